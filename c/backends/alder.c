/* alder.c: AVX-VNNI, VPDPBUSD on 256 bits in VEX encoding. It sums four u8 x s8 products into 32 bits without saturation,
 * so documents keep 8 bits (1..255) and the bias leaves with the preset of the sums.
 *
 * Tile: 3 x 8 document tokens x 4 query tokens: 12 accumulators hide VPDPBUSD's latency of 5 at two a cycle; with three
 * document vectors and a broadcast all 16 registers are in use. */
#include <numkong/backend.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <immintrin.h>

#ifndef NK_ALDER_TARGET
#define NK_ALDER_TARGET "avx2,fma,f16c,avxvnni"
#endif
NK_TARGET_BEGIN(NK_ALDER_TARGET)

#define NK_TILE_TOKENS_ 8
#define NK_QUERY_GROUP_ 4
#define NK_CODE_LIMIT_ 127
#define NK_CODE_BIAS_ 128

#include "../kernels/x86_v3.inc"

/* Tiles x one group of queries. `tiles` is a constant, 1 to 3. */
NK_INLINE void nk_screen_tiles_(int const tiles, nk_u8_t const *plane, nk_size_t tile_bytes, nk_f32_t const *scale,
                                nk_i8_t const *codes, nk_i32_t const *preset, nk_size_t steps, nk_f32_t *values,
                                nk_size_t value_stride) {
    __m256i sums[NK_QUERY_GROUP_][3];
    for (int query = 0; query != NK_QUERY_GROUP_; ++query)
        for (int tile = 0; tile != tiles; ++tile) sums[query][tile] = _mm256_set1_epi32(preset[query]);
    for (nk_size_t step = 0; step != steps; ++step, plane += 32, codes += NK_QUERY_GROUP_ * 4) {
        __m256i documents[3];
        for (int tile = 0; tile != tiles; ++tile)
            documents[tile] = _mm256_loadu_si256((__m256i const *)(plane + (nk_size_t)tile * tile_bytes));
#pragma GCC unroll 4
        for (int query = 0; query != NK_QUERY_GROUP_; ++query) {
            nk_i32_t word;
            memcpy(&word, codes + query * 4, 4);
            __m256i const query_i8x32 = _mm256_set1_epi32(word);
            for (int tile = 0; tile != tiles; ++tile)
                sums[query][tile] = _mm256_dpbusd_avx_epi32(sums[query][tile], documents[tile], query_i8x32);
        }
    }
    for (int query = 0; query != NK_QUERY_GROUP_; ++query)
        for (int tile = 0; tile != tiles; ++tile)
            _mm256_storeu_ps(values + (nk_size_t)query * value_stride + tile * 8,
                             _mm256_mul_ps(_mm256_cvtepi32_ps(sums[query][tile]), _mm256_loadu_ps(scale + tile * 8)));
}
#define NK_PANEL_TILES_ 3

#include "../kernels/panels.inc"
#include "../packing.inc"
#include "../scoring.inc"

NK_TARGET_END

nk_backend_kernels_t const nk_backend_alder_kernels = {NK_TILE_TOKENS_, NULL, nk_pack_rows_, nk_score_corpus_};
