/* neonsdot.c: Armv8.2 dot products. SDOT sums four s8 x s8 products into 32 bits without saturation, and its second
 * operand may be one word of a vector for all four lanes: a vector of four query tokens' words serves four sums, and
 * nothing is broadcast.
 *
 *   sums[query][tokens 0..3] += documents[tokens 0..3] . queries[query]      24 sums, one document and one query vector
 *
 * Tile: 3 x 8 document tokens x 4 query tokens: 24 sums keep four pipes of latency 4 busy with half to spare, and seven
 * loads go with 24 products. BFMMLA multiplies no more per instruction than SDOT, from twice the bytes, so there is no
 * row for it; f32 products of the second screen are FMLA by element. */
#include <numkong/backend.h>

#if NK_COMPILE_neonsdot
#include <arm_neon.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

NK_TARGET_BEGIN("arch=armv8.2-a+dotprod")

#define NK_TILE_TOKENS_ 8
#define NK_QUERY_GROUP_ 4
#define NK_CODE_LIMIT_ 127
#define NK_CODE_BIAS_ 0
#define NK_DIRECT_HALVES_(dtype) 0
#define NK_PANEL_TILES_ 3

#include "../kernels/arm_neon.inc"

/* sums[query] += documents x word `query` of the queries. */
NK_INLINE void nk_multiply_word_(nk_operation_t const operation, int32x4_t sums[4], int32x4_t documents,
                                 int32x4_t queries) {
    if (operation == nk_multiply_codes_k) {
        int8x16_t const codes = vreinterpretq_s8_s32(documents), query_codes = vreinterpretq_s8_s32(queries);
        sums[0] = vdotq_laneq_s32(sums[0], codes, query_codes, 0);
        sums[1] = vdotq_laneq_s32(sums[1], codes, query_codes, 1);
        sums[2] = vdotq_laneq_s32(sums[2], codes, query_codes, 2);
        sums[3] = vdotq_laneq_s32(sums[3], codes, query_codes, 3);
        return;
    }
    float32x4_t const values = vreinterpretq_f32_s32(documents), query_values = vreinterpretq_f32_s32(queries);
#define NK_ADD_(query)                                                                                                 \
    sums[query] =                                                                                                      \
        vreinterpretq_s32_f32(vfmaq_laneq_f32(vreinterpretq_f32_s32(sums[query]), values, query_values, query))
    NK_ADD_(0);
    NK_ADD_(1);
    NK_ADD_(2);
    NK_ADD_(3);
#undef NK_ADD_
}

/* Tiles x one group of queries; `operation` and `tiles` are constants. values = sums * scale. */
NK_INLINE void nk_multiply_tiles_(nk_operation_t const operation, int const tiles, nk_u8_t const *plane,
                                  nk_size_t tile_bytes, nk_f32_t const *scale, nk_u8_t const *queries,
                                  nk_i32_t const *preset, nk_size_t words, nk_f32_t *values, nk_size_t value_stride) {
    int32x4_t sums[2 * NK_PANEL_TILES_][4];
    (void)preset; /* zeros: the codes have no bias */
#pragma GCC unroll 8
    for (int half = 0; half != 2 * tiles; ++half)
        for (int query = 0; query != 4; ++query) sums[half][query] = vdupq_n_s32(0);
    for (nk_size_t word = 0; word != words; ++word, plane += 32, queries += 16) {
        int32x4_t const query = vreinterpretq_s32_u8(vld1q_u8(queries));
#pragma GCC unroll 8
        for (int half = 0; half != 2 * tiles; ++half) {
            nk_u8_t const *const documents = plane + (nk_size_t)(half / 2) * tile_bytes + half % 2 * 16;
            nk_multiply_word_(operation, sums[half], vreinterpretq_s32_u8(vld1q_u8(documents)), query);
        }
    }
#pragma GCC unroll 8
    for (int half = 0; half != 2 * tiles; ++half)
        for (int query = 0; query != 4; ++query) {
            float32x4_t const sum = operation == nk_multiply_codes_k ? vcvtq_f32_s32(sums[half][query])
                                                                     : vreinterpretq_f32_s32(sums[half][query]);
            vst1q_f32(values + (nk_size_t)query * value_stride + half * 4, vmulq_f32(sum, vld1q_f32(scale + half * 4)));
        }
}

#include "../kernels/panels.inc"
#include "../packing.inc"
#include "../scoring.inc"
#include "../coded.inc"
#include "../gradient.inc"
#include "../kernels/arm_vector128.inc"
#include "../nearest.inc"

NK_TARGET_END

nk_backend_kernels_t const nk_backend_neonsdot_kernels = {
    NK_TILE_TOKENS_, nk_pack_rows_,  nk_score_corpus_, nk_gradient_rows_, nk_nearest_rows_,
    nk_square_rows_, NK_CODED_TILE_, NK_CODED_BIAS_,   nk_score_coded_,   nk_decode_rows_,
};

#endif
