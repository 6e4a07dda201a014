/* alder.c: AVX-VNNI, VPDPBUSD on 256 bits in VEX encoding. It sums four u8 x s8 products into 32 bits without
 * saturation, so documents keep 8 bits (1..255) and the bias leaves with the preset of the sums.
 *
 * Tile: 3 x 8 document tokens x 4 query tokens: 12 accumulators hide VPDPBUSD's latency of 5 at two a cycle; with three
 * document vectors and a broadcast all 16 registers are in use. */
#include <numkong/backend.h>

#if NK_COMPILE_alder
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <immintrin.h>

#ifndef NK_ALDER_TARGET
#define NK_ALDER_TARGET "avx2,fma,f16c,popcnt,avxvnni"
#endif
NK_TARGET_BEGIN(NK_ALDER_TARGET)

#define NK_TILE_TOKENS_ 8
#define NK_QUERY_GROUP_ 4
#define NK_CODE_LIMIT_ 127
#define NK_CODE_BIAS_ 128

#include "../kernels/x86_v3.inc"
#include "../kernels/transpose.inc"

/* sums[token] += the four products of a word. gcc 12 copies and spills the sums around the intrinsic (63 % of the
 * unit's rate on Emerald Rapids); an instruction of its own keeps each in its register. */
NK_INLINE __m256i nk_multiply_codes_(__m256i sums, __m256i documents, __m256i query) {
#if defined(__GNUC__) && !defined(NK_EMULATED)
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(documents), "x"(query));
    return sums;
#else
    return _mm256_dpbusd_avx_epi32(sums, documents, query);
#endif
}
#define NK_PANEL_TILES_ 3

#include "../kernels/x86_tile256.inc"
#include "../packing.inc"
#include "../scoring.inc"
#include "../coded.inc"
#include "../gradient.inc"
#include "../kernels/x86_vector256.inc"
#include "../nearest.inc"

NK_TARGET_END

nk_backend_kernels_t const nk_backend_alder_kernels = {
    NK_TILE_TOKENS_, nk_pack_rows_,  nk_score_corpus_, nk_gradient_rows_, nk_nearest_rows_,
    nk_square_rows_, NK_CODED_TILE_, NK_CODED_BIAS_,   nk_score_coded_,   nk_decode_rows_,
};

#endif
