/* genoa.c: AVX-512 with VNNI and BF16. Screening is icelake's; where too many tokens survive it, the second screen is
 * VDPBF16PS on the stored bfloat16s, at twice the rate of f32 FMA and without a conversion. */
#include <numkong/backend.h>

#if NK_COMPILE_genoa
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <immintrin.h>

#ifndef NK_GENOA_TARGET
#define NK_GENOA_TARGET "avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"
#endif
NK_TARGET_BEGIN(NK_GENOA_TARGET)

#define NK_TILE_TOKENS_ 16
#define NK_QUERY_GROUP_ 8
#define NK_CODE_LIMIT_ 127
#define NK_CODE_BIAS_ 128
#define NK_HAS_DPBF16_

#include "../kernels/x86_v4.inc"
#include "../kernels/transpose.inc"
#include "../kernels/x86_vnni512.inc"
#include "../packing.inc"
#include "../scoring.inc"
#include "../coded.inc"
#include "../gradient.inc"
#include "../kernels/x86_vector512.inc"
#include "../nearest.inc"

NK_TARGET_END

nk_backend_kernels_t const nk_backend_genoa_kernels = {
    NK_TILE_TOKENS_, nk_pack_rows_,  nk_score_corpus_, nk_gradient_rows_, nk_nearest_rows_,
    nk_square_rows_, NK_CODED_TILE_, NK_CODED_BIAS_,   nk_score_coded_,   nk_decode_rows_,
};

#endif
