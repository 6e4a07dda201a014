/* serial.c: the portable row, and the reference for the others. It screens nothing: every pair of tokens gets its f64
 * value, element k added in order to lane k mod 16, the lanes folded by +8, +4, +2, +1. */
#include <numkong/backend.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-vectorize", "no-tree-slp-vectorize") /* it stays the reference */
#endif

#define NK_TILE_TOKENS_ 0
#define NK_QUERY_GROUP_ 1
#define NK_CODED_TILE_ 8
#define NK_CODED_BIAS_ 128
#define NK_CODED_PORTABLE_
#define NK_NEAREST_LANES_ 0

static nk_f32_t nk_widen_bf16_(nk_u16_t bits) {
    nk_u32_t const wide = (nk_u32_t)bits << 16;
    nk_f32_t value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

static nk_f32_t nk_widen_f16_(nk_u16_t half) {
    nk_u32_t const sign = (nk_u32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    nk_u32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
    if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
    nk_f32_t value;
    memcpy(&value, &bits, sizeof(value));
    if (exponent == 0) value = (nk_f32_t)mantissa * (sign ? -0x1p-24f : 0x1p-24f); /* subnormals and zeros */
    return value;
}

static nk_f32_t nk_widen_(nk_dtype_t dtype, void const *token, nk_size_t k) {
    switch (dtype) {
    case nk_bf16_k: return nk_widen_bf16_(((nk_u16_t const *)token)[k]);
    case nk_f16_k: return nk_widen_f16_(((nk_u16_t const *)token)[k]);
    default: return ((nk_f32_t const *)token)[k];
    }
}

static void nk_widen_row_(nk_dtype_t dtype, void const *token, nk_size_t depth, nk_f32_t *row) {
    for (nk_size_t k = 0; k != depth; ++k) row[k] = nk_widen_(dtype, token, k);
}

static nk_f64_t nk_fold_lanes_(nk_f64_t lanes[16]) {
    for (int half = 8; half != 0; half /= 2)
        for (int lane = 0; lane != half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static nk_f64_t nk_square_(nk_f32_t const *row, nk_size_t depth, nk_f32_t *largest) {
    nk_f64_t lanes[16] = {0};
    *largest = 0;
    for (nk_size_t k = 0; k != depth; ++k) {
        nk_f32_t const magnitude = fabsf(row[k]);
        lanes[k % 16] += (nk_f64_t)row[k] * row[k];
        if (magnitude > *largest) *largest = magnitude;
    }
    return nk_fold_lanes_(lanes);
}

/* codes = round(row / scale) within +-limit, plus the bias; returns a bound of |row - scale codes| from above, in f64
 * (docs/numerics.md). Codes past the depth are zero (plus the bias). */
static nk_f64_t nk_quantise_row_(nk_f32_t const *row, nk_size_t depth, nk_f32_t scale, int limit, int bias,
                                 nk_i8_t *codes) {
    nk_f32_t const inverse = 1 / scale;
    nk_f64_t left = 0;
    for (nk_size_t k = 0; k != (depth + 3) / 4 * 4; ++k) {
        nk_f32_t code = k < depth ? rintf(row[k] * inverse) : 0;
        code = code > (nk_f32_t)limit ? (nk_f32_t)limit : code < -(nk_f32_t)limit ? -(nk_f32_t)limit : code;
        nk_f64_t const rest = k < depth ? row[k] - (nk_f64_t)code * scale : 0;
        left += rest * rest;
        codes[k] = (nk_i8_t)((int)code + bias);
    }
    return sqrt(left * (1 + ((nk_f64_t)depth + 64) * 0x1p-52));
}

/* The largest of a row's values, none of them a NaN. */
static nk_f32_t nk_row_largest_(nk_f32_t const *values, nk_size_t count) {
    nk_f32_t largest = values[0];
    for (nk_size_t token = 1; token < count; ++token) largest = values[token] > largest ? values[token] : largest;
    return largest;
}

#include "../kernels/bit_words.inc"

/* Bits in which the tokens of a tile differ from query tokens. */
static void nk_count_bits_(int queries, nk_u8_t const *tile, nk_size_t steps, nk_u8_t const *operands, nk_size_t stride,
                           nk_u8_t *counts) {
    static nk_u8_t const ones[16] = {0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4};
    memset(counts, 0, (nk_size_t)queries * nk_binary_tile_tokens_k);
    for (int query = 0; query != queries; ++query, operands += stride, counts += nk_binary_tile_tokens_k)
        for (nk_size_t step = 0; step != steps; ++step)
            for (nk_size_t token = 0; token != nk_binary_tile_tokens_k; ++token) {
                nk_u8_t const differing = tile[step * nk_binary_tile_tokens_k + token] ^ operands[step];
                counts[token] += ones[differing & 15] + ones[differing >> 4];
            }
}

static nk_f64_t nk_dot_(nk_dtype_t dtype, nk_f64_t const *query, void const *token, nk_size_t depth) {
    nk_f64_t lanes[16] = {0};
    for (nk_size_t k = 0; k != depth; ++k) lanes[k % 16] += query[k] * nk_widen_(dtype, token, k);
    return nk_fold_lanes_(lanes);
}

static nk_f64_t nk_dot_f32_(nk_f64_t const *query, void const *token, nk_size_t depth) {
    return nk_dot_(nk_f32_k, query, token, depth);
}
static nk_f64_t nk_dot_f16_(nk_f64_t const *query, void const *token, nk_size_t depth) {
    return nk_dot_(nk_f16_k, query, token, depth);
}
static nk_f64_t nk_dot_bf16_(nk_f64_t const *query, void const *token, nk_size_t depth) {
    return nk_dot_(nk_bf16_k, query, token, depth);
}

#include "../packing.inc"
#include "../scoring.inc"
#include "../coded.inc"
#include "../gradient.inc"
#include "../nearest.inc"

nk_backend_kernels_t const nk_backend_serial_kernels = {
    NK_TILE_TOKENS_, nk_pack_rows_,  nk_score_corpus_, nk_gradient_rows_, nk_nearest_rows_,
    nk_square_rows_, NK_CODED_TILE_, NK_CODED_BIAS_,   nk_score_coded_,   nk_decode_rows_,
};
