/* The AVX-512 intrinsics of the kernels that SIMDe 0.8.2 lacks, or that it models with other effects than the
 * hardware's.
 *
 * Lacking: conversions between f32, i32 and f64, truncation to bytes, masked comparison, sums over a vector.
 * Replaced: masked loads read, and masked stores overwrite with zeros, the elements whose mask bit is clear (here those
 * are not touched, so a tail at the end of a page works and AddressSanitizer can judge it); maxima over a vector start
 * from a constant that is not the least value.
 *
 * Sums fold in the compiler's order (+8, +4, +2, +1), so that they have the hardware's bits.
 */
#ifndef NUMKONG_EMULATION_AVX512_MODEL_H
#define NUMKONG_EMULATION_AVX512_MODEL_H

#include <stdint.h>
#include <string.h>

typedef union {
    __m512i whole;
    __m256i halves[2];
    uint8_t u8[64];
    uint16_t u16[32];
    uint32_t u32[16];
    int32_t i32[16];
    float f32[16];
    double f64[8];
} nk_model_vector_t_;

static inline __m256i nk_model_half_(__m512i vector, int half) {
    nk_model_vector_t_ const parts = {vector};
    return parts.halves[half];
}

static inline __m512i nk_model_join_(__m256i low, __m256i high) {
    nk_model_vector_t_ parts;
    parts.halves[0] = low;
    parts.halves[1] = high;
    return parts.whole;
}

/* ---------------------------------------------------------------------------------------------------- conversions */

static inline __m512d nk_model_cvtps_pd_(__m256 values) {
    return (__m512d)nk_model_join_((__m256i)_mm256_cvtps_pd(_mm256_castps256_ps128(values)),
                                   (__m256i)_mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
}

static inline __m256 nk_model_cvtpd_ps_(__m512d values) {
    __m256d const low = (__m256d)nk_model_half_((__m512i)values, 0), high = (__m256d)nk_model_half_((__m512i)values, 1);
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low)), _mm256_cvtpd_ps(high), 1);
}

static inline __m512d nk_model_cvtepi32_pd_(__m256i values) {
    return (__m512d)nk_model_join_((__m256i)_mm256_cvtepi32_pd(_mm256_castsi256_si128(values)),
                                   (__m256i)_mm256_cvtepi32_pd(_mm256_extracti128_si256(values, 1)));
}

static inline __m128i nk_model_cvtepi32_epi8_(__m512i values) {
    nk_model_vector_t_ const parts = {values};
    uint8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)parts.u32[i];
    return _mm_loadu_si128((__m128i const *)bytes);
}

#undef _mm512_cvtps_pd
#define _mm512_cvtps_pd(values) nk_model_cvtps_pd_(values)
#undef _mm512_cvtpd_ps
#define _mm512_cvtpd_ps(values) nk_model_cvtpd_ps_(values)
#undef _mm512_cvtepi32_pd
#define _mm512_cvtepi32_pd(values) nk_model_cvtepi32_pd_(values)
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8(values) nk_model_cvtepi32_epi8_(values)

/* -------------------------------------------------------------------------------------------- masked memory, masks */

/* Elements of 2 or 4 bytes, `count` of them, zeros where the mask bit is clear. */
static inline __m512i nk_model_masked_load_(uint64_t mask, void const *memory, int element_bytes, int count) {
    nk_model_vector_t_ parts;
    memset(&parts, 0, sizeof parts);
    for (int i = 0; i < count; i++)
        if (mask >> i & 1)
            memcpy(parts.u8 + i * element_bytes, (char const *)memory + i * element_bytes, (size_t)element_bytes);
    return parts.whole;
}

static inline void nk_model_masked_store_(void *memory, uint64_t mask, __m512i vector, int element_bytes, int count) {
    nk_model_vector_t_ const parts = {vector};
    for (int i = 0; i < count; i++)
        if (mask >> i & 1)
            memcpy((char *)memory + i * element_bytes, parts.u8 + i * element_bytes, (size_t)element_bytes);
}

#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(mask, memory) ((__m512)nk_model_masked_load_(mask, memory, 4, 16))
#undef _mm512_maskz_loadu_epi32
#define _mm512_maskz_loadu_epi32(mask, memory) nk_model_masked_load_(mask, memory, 4, 16)
#undef _mm512_maskz_loadu_pd
#define _mm512_maskz_loadu_pd(mask, memory) ((__m512d)nk_model_masked_load_(mask, memory, 8, 8))
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16(mask, memory) nk_model_masked_load_(mask, memory, 2, 32)
#undef _mm512_maskz_loadu_epi8
#define _mm512_maskz_loadu_epi8(mask, memory) nk_model_masked_load_(mask, memory, 1, 64)
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16(mask, memory) nk_model_half_(nk_model_masked_load_(mask, memory, 2, 16), 0)
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps(memory, mask, vector) nk_model_masked_store_(memory, mask, (__m512i)(vector), 4, 16)
#undef _mm512_mask_storeu_epi32
#define _mm512_mask_storeu_epi32(memory, mask, vector) nk_model_masked_store_(memory, mask, vector, 4, 16)
#undef _mm512_mask_storeu_pd
#define _mm512_mask_storeu_pd(memory, mask, vector) nk_model_masked_store_(memory, mask, (__m512i)(vector), 8, 8)
#undef _mm512_mask_storeu_epi8
#define _mm512_mask_storeu_epi8(memory, mask, vector) nk_model_masked_store_(memory, mask, vector, 1, 64)

#undef _mm512_mask_cmp_ps_mask
#define _mm512_mask_cmp_ps_mask(mask, left, right, predicate)                                                          \
    ((__mmask16)((mask) & _mm512_cmp_ps_mask(left, right, predicate)))

/* ----------------------------------------------------------------------------------------------------- reductions */

static inline float nk_model_reduce_add_ps_(__m512 vector) {
    nk_model_vector_t_ parts = {(__m512i)vector};
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) parts.f32[i] += parts.f32[i + half];
    return parts.f32[0];
}

static inline double nk_model_reduce_add_pd_(__m512d vector) {
    nk_model_vector_t_ parts = {(__m512i)vector};
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) parts.f64[i] += parts.f64[i + half];
    return parts.f64[0];
}

static inline int32_t nk_model_reduce_add_epi32_(__m512i vector) {
    nk_model_vector_t_ const parts = {vector};
    uint32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += parts.u32[i];
    return (int32_t)sum;
}

static inline int32_t nk_model_reduce_max_epi32_(__m512i vector) {
    nk_model_vector_t_ const parts = {vector};
    int32_t best = parts.i32[0];
    for (int i = 1; i < 16; i++) best = parts.i32[i] > best ? parts.i32[i] : best;
    return best;
}

/* MAXPS keeps its second operand when either is NaN, so where NaNs are the order of folding shows. */
static inline float nk_model_reduce_max_ps_(__m512 vector) {
    nk_model_vector_t_ parts = {(__m512i)vector};
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            parts.f32[i] = half >= 4 ? (parts.f32[i + half] > parts.f32[i] ? parts.f32[i + half] : parts.f32[i])
                                     : (parts.f32[i] > parts.f32[i + half] ? parts.f32[i] : parts.f32[i + half]);
    return parts.f32[0];
}

#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps(vector) nk_model_reduce_add_ps_(vector)
#undef _mm512_reduce_add_pd
#define _mm512_reduce_add_pd(vector) nk_model_reduce_add_pd_(vector)
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_add_epi32(vector) nk_model_reduce_add_epi32_(vector)
#undef _mm512_reduce_max_epi32
#define _mm512_reduce_max_epi32(vector) nk_model_reduce_max_epi32_(vector)
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps(vector) nk_model_reduce_max_ps_(vector)

#endif
