/* A software model of the AMX tile intrinsics: a tile file per thread, the rules of the instruction manual checked.
 *
 * A broken rule (palette, shapes, operands, an unconfigured tile) would be a fault on the hardware; here it is one
 * sentence on stderr and abort(). Loads and stores touch the bytes that the hardware would, so AddressSanitizer sees
 * every over-read. Rows and bytes outside a tile's shape are zeroed by every write, as the hardware does.
 *
 * TDPBF16PS keeps, per output lane, one chain of fused multiply-adds over the even elements and one over the odd ones,
 * adds the two, then the old value (Intel SDM, volume 2), flushing subnormals as VDPBF16PS does. Emerald Rapids
 * computes these very bits, and neither one chain in order nor pairs added in turn (selftest.c, --hardware).
 */
#ifndef NUMKONG_EMULATION_AMX_MODEL_H
#define NUMKONG_EMULATION_AMX_MODEL_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { nk_model_tiles_k = 8, nk_model_tile_rows_k = 16, nk_model_tile_row_bytes_k = 64 };

typedef struct {
    uint8_t bytes[nk_model_tile_rows_k][nk_model_tile_row_bytes_k];
    unsigned rows, row_bytes;
} nk_model_tile_t_;

static __thread nk_model_tile_t_ nk_model_tile_file_[nk_model_tiles_k];

__attribute__((unused)) static void nk_model_require_(int holds, char const *instruction, char const *rule) {
    if (holds) return;
    fprintf(stderr, "AMX model: %s: %s\n", instruction, rule);
    abort();
}

__attribute__((unused)) static nk_model_tile_t_ *nk_model_tile_(unsigned tile, char const *instruction) {
    nk_model_require_(tile < nk_model_tiles_k, instruction, "there are tiles 0 to 7");
    nk_model_require_(nk_model_tile_file_[tile].rows != 0, instruction, "the tile is not configured");
    return &nk_model_tile_file_[tile];
}

__attribute__((unused)) static void nk_model_tile_release_(void) {
    memset(nk_model_tile_file_, 0, sizeof nk_model_tile_file_);
}

/* The 64 bytes: palette, start_row, 14 reserved, 16 words of bytes per row, 16 bytes of rows; entries from the ninth on
 * are reserved. */
__attribute__((unused)) static void nk_model_tile_loadconfig_(void const *config) {
    char const *const name = "ldtilecfg";
    uint8_t bytes[64];
    memcpy(bytes, config, sizeof bytes);
    nk_model_tile_release_();
    if (bytes[0] == 0) return;
    nk_model_require_(bytes[0] == 1, name, "the palette must be 0 or 1");
    nk_model_require_(bytes[1] == 0, name, "the model takes only start_row 0");
    for (unsigned i = 2; i < 16; i++) nk_model_require_(bytes[i] == 0, name, "bytes 2 to 15 are reserved");
    for (unsigned tile = 0; tile < 16; tile++) {
        unsigned const row_bytes = bytes[16 + 2 * tile] | (unsigned)bytes[17 + 2 * tile] << 8;
        unsigned const rows = bytes[48 + tile];
        nk_model_require_(tile < nk_model_tiles_k || (rows == 0 && row_bytes == 0), name,
                          "tiles from 8 on are reserved");
        nk_model_require_(rows <= nk_model_tile_rows_k, name, "a tile has at most 16 rows");
        nk_model_require_(row_bytes <= nk_model_tile_row_bytes_k, name, "a tile row has at most 64 bytes");
        nk_model_require_((rows == 0) == (row_bytes == 0), name, "rows and bytes per row must both be zero or neither");
        if (tile >= nk_model_tiles_k) continue;
        nk_model_tile_file_[tile].rows = rows;
        nk_model_tile_file_[tile].row_bytes = row_bytes;
    }
}

__attribute__((unused)) static void nk_model_tile_zero_(unsigned tile) {
    nk_model_tile_t_ *const target = nk_model_tile_(tile, "tilezero");
    memset(target->bytes, 0, sizeof target->bytes);
}

__attribute__((unused)) static void nk_model_tile_loadd_(unsigned tile, void const *base, size_t stride) {
    nk_model_tile_t_ *const target = nk_model_tile_(tile, "tileloadd");
    memset(target->bytes, 0, sizeof target->bytes);
    for (unsigned row = 0; row < target->rows; row++)
        memcpy(target->bytes[row], (char const *)base + row * stride, target->row_bytes);
}

__attribute__((unused)) static void nk_model_tile_stored_(unsigned tile, void *base, size_t stride) {
    nk_model_tile_t_ const *const source = nk_model_tile_(tile, "tilestored");
    for (unsigned row = 0; row < source->rows; row++)
        memcpy((char *)base + row * stride, source->bytes[row], source->row_bytes);
}

/* The operand rules that the dot products share. */
__attribute__((unused)) static void nk_model_check_product_(unsigned sums, unsigned left, unsigned right,
                                                            char const *name) {
    nk_model_tile_t_ const *const c = nk_model_tile_(sums, name);
    nk_model_tile_t_ const *const a = nk_model_tile_(left, name);
    nk_model_tile_t_ const *const b = nk_model_tile_(right, name);
    nk_model_require_(c != a && c != b && a != b, name, "the three tiles must differ");
    nk_model_require_(c->row_bytes % 4 == 0 && a->row_bytes % 4 == 0 && b->row_bytes % 4 == 0, name,
                      "bytes per row must be multiples of 4");
    nk_model_require_(c->rows == a->rows, name, "the sums and the left tile need the same rows");
    nk_model_require_(c->row_bytes == b->row_bytes, name, "the sums and the right tile need the same bytes per row");
    nk_model_require_(a->row_bytes / 4 == b->rows, name,
                      "the left tile's groups of 4 bytes must match the right tile's rows");
}

/* Zeros past the shape of a tile that was computed on whole rows. */
__attribute__((unused)) static void nk_model_trim_(nk_model_tile_t_ *tile) {
    for (unsigned row = 0; row < tile->rows; row++)
        memset(tile->bytes[row] + tile->row_bytes, 0, nk_model_tile_row_bytes_k - tile->row_bytes);
}

__attribute__((unused)) static void nk_model_tile_dp_bytes_(unsigned sums, unsigned left, unsigned right,
                                                            int left_signed, int right_signed, char const *name) {
    nk_model_check_product_(sums, left, right, name);
    nk_model_tile_t_ *const c = &nk_model_tile_file_[sums];
    nk_model_tile_t_ const *const a = &nk_model_tile_file_[left], *const b = &nk_model_tile_file_[right];
    for (unsigned row = 0; row < c->rows; row++)
        for (unsigned half = 0; half < 2; half++) {
            __m256i *const lanes = (__m256i *)&c->bytes[row][32 * half];
            __m256i sums_i32x8 = _mm256_loadu_si256(lanes);
            for (unsigned group = 0; group < b->rows; group++) {
                int codes;
                memcpy(&codes, &a->bytes[row][4 * group], sizeof codes);
                __m256i const right_x32 = _mm256_loadu_si256((__m256i const *)&b->bytes[group][32 * half]);
                sums_i32x8 =
                    nk_model_dot_bytes_(sums_i32x8, _mm256_set1_epi32(codes), left_signed, right_x32, right_signed);
            }
            _mm256_storeu_si256(lanes, sums_i32x8);
        }
    nk_model_trim_(c);
}

__attribute__((unused)) static void nk_model_tile_dpbf16ps_(unsigned sums, unsigned left, unsigned right) {
    nk_model_check_product_(sums, left, right, "tdpbf16ps");
    nk_model_tile_t_ *const c = &nk_model_tile_file_[sums];
    nk_model_tile_t_ const *const a = &nk_model_tile_file_[left], *const b = &nk_model_tile_file_[right];
    __m256 const one_f32x8 = _mm256_set1_ps(1.0f);
    __m256i const high_mask = _mm256_set1_epi32((int)0xFFFF0000u);
    for (unsigned row = 0; row < c->rows; row++)
        for (unsigned half = 0; half < 2; half++) {
            __m256 even_f32x8 = _mm256_setzero_ps(), odd_f32x8 = _mm256_setzero_ps();
            for (unsigned group = 0; group < b->rows; group++) {
                int pair;
                memcpy(&pair, &a->bytes[row][4 * group], sizeof pair);
                __m256i const left_bf16x16 = _mm256_set1_epi32(pair);
                __m256i const right_bf16x16 = _mm256_loadu_si256((__m256i const *)&b->bytes[group][32 * half]);
                even_f32x8 =
                    nk_model_flushing_fmadd_(_mm256_castsi256_ps(_mm256_slli_epi32(left_bf16x16, 16)),
                                             _mm256_castsi256_ps(_mm256_slli_epi32(right_bf16x16, 16)), even_f32x8);
                odd_f32x8 = nk_model_flushing_fmadd_(_mm256_castsi256_ps(_mm256_and_si256(left_bf16x16, high_mask)),
                                                     _mm256_castsi256_ps(_mm256_and_si256(right_bf16x16, high_mask)),
                                                     odd_f32x8);
            }
            float *const lanes = (float *)&c->bytes[row][32 * half];
            __m256 const products_f32x8 = nk_model_flushing_fmadd_(even_f32x8, one_f32x8, odd_f32x8);
            _mm256_storeu_ps(lanes, nk_model_flushing_fmadd_(products_f32x8, one_f32x8, _mm256_loadu_ps(lanes)));
        }
    nk_model_trim_(c);
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) nk_model_tile_loadconfig_(config)
#define _tile_release() nk_model_tile_release_()
#define _tile_zero(tile) nk_model_tile_zero_(tile)
#define _tile_loadd(tile, base, stride) nk_model_tile_loadd_(tile, base, (size_t)(stride))
#define _tile_stream_loadd(tile, base, stride) nk_model_tile_loadd_(tile, base, (size_t)(stride))
#define _tile_stored(tile, base, stride) nk_model_tile_stored_(tile, base, (size_t)(stride))
#define _tile_dpbssd(sums, left, right) nk_model_tile_dp_bytes_(sums, left, right, 1, 1, "tdpbssd")
#define _tile_dpbsud(sums, left, right) nk_model_tile_dp_bytes_(sums, left, right, 1, 0, "tdpbsud")
#define _tile_dpbusd(sums, left, right) nk_model_tile_dp_bytes_(sums, left, right, 0, 1, "tdpbusd")
#define _tile_dpbuud(sums, left, right) nk_model_tile_dp_bytes_(sums, left, right, 0, 0, "tdpbuud")
#define _tile_dpbf16ps(sums, left, right) nk_model_tile_dpbf16ps_(sums, left, right)

#endif
