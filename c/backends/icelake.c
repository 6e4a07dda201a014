/* icelake.c: AVX-512 with VNNI; the screening tile is in kernels/x86_vnni512.inc. */
#include <numkong/backend.h>

#if NK_COMPILE_icelake
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <immintrin.h>

#ifndef NK_ICELAKE_TARGET
#define NK_ICELAKE_TARGET "avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#endif
NK_TARGET_BEGIN(NK_ICELAKE_TARGET)

#define NK_TILE_TOKENS_ 16
#define NK_QUERY_GROUP_ 8
#define NK_CODE_LIMIT_ 127
#define NK_CODE_BIAS_ 128

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

nk_backend_kernels_t const nk_backend_icelake_kernels = {
    NK_TILE_TOKENS_, nk_pack_rows_,  nk_score_corpus_, nk_gradient_rows_, nk_nearest_rows_,
    nk_square_rows_, NK_CODED_TILE_, NK_CODED_BIAS_,   nk_score_coded_,   nk_decode_rows_,
};

#endif
