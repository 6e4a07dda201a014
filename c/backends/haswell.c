/* haswell.c: AVX2. Screening by VPMADDUBSW, whose 16-bit pair sums saturate: documents are quantised to 7 bits and
 * stored as 1..127, queries to 8 bits, so a pair sum is at most 2 * 127 * 127 = 32258 < 32768 and never does. Coded
 * documents keep 8 bits (1..255) and their queries 7: 2 * 255 * 63 = 32130.
 *
 * Tile: 2 x 8 document tokens x 4 query tokens, 8 accumulators; with two document vectors, a broadcast, a product and
 * the ones of VPMADDWD that is 13 of the 16 registers. Three vector operations per 32 products against four FMAs, two
 * of them on the multiplier ports: twice the rate of f32 FMA. */
#include <numkong/backend.h>

#if NK_COMPILE_haswell
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <immintrin.h>

#ifndef NK_HASWELL_TARGET
#define NK_HASWELL_TARGET "avx2,fma,f16c,popcnt"
#endif
NK_TARGET_BEGIN(NK_HASWELL_TARGET)

#define NK_TILE_TOKENS_ 8
#define NK_QUERY_GROUP_ 4
#define NK_CODE_LIMIT_ 63
#define NK_CODE_BIAS_ 64
#define NK_CODED_BIAS_ 128
#define NK_CODED_QUERY_LIMIT_ 63

#include "../kernels/x86_v3.inc"
#include "../kernels/transpose.inc"

/* sums[token] += the four products of a word. gcc 12 copies the sums around the intrinsics and spills one of them; an
 * addition of its own keeps each in its register (0.85 of the time of a rerank on Zen 3). */
NK_INLINE __m256i nk_multiply_codes_(__m256i sums, __m256i documents, __m256i query) {
    __m256i const product = _mm256_madd_epi16(_mm256_maddubs_epi16(documents, query), _mm256_set1_epi16(1));
#if defined(__GNUC__)
    __asm__("vpaddd %1, %0, %0" : "+x"(sums) : "x"(product));
    return sums;
#else
    return _mm256_add_epi32(sums, product);
#endif
}
#define NK_PANEL_TILES_ 2

#include "../kernels/x86_tile256.inc"
#include "../packing.inc"
#include "../scoring.inc"
#include "../coded.inc"
#include "../gradient.inc"
#include "../kernels/x86_vector256.inc"
#include "../nearest.inc"

NK_TARGET_END

nk_backend_kernels_t const nk_backend_haswell_kernels = {
    NK_TILE_TOKENS_, nk_pack_rows_,  nk_score_corpus_, nk_gradient_rows_, nk_nearest_rows_,
    nk_square_rows_, NK_CODED_TILE_, NK_CODED_BIAS_,   nk_score_coded_,   nk_decode_rows_,
};

#endif
