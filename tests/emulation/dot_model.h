/* Software models of the dot-product instructions: VPDPBUSD (AVX-VNNI and AVX-512 VNNI) on AVX2, VDPBF16PS on FMA.
 *
 * VPDPBUSD is exact in int32 with wrap-around. Its AVX2 relative VPMADDUBSW saturates, so the model widens to 16 bits
 * and uses VPMADDWD: the even bytes of every 32-bit group in one product, the odd bytes in another.
 *
 * VDPBF16PS (Intel SDM, volume 2): two fused multiply-adds into an f32 lane, the odd element of the pair first,
 * rounding to nearest even, with subnormal inputs read as zero and subnormal results flushed, whatever MXCSR says, and
 * no exception flags. The model sets MXCSR to just that around two VFMADD231PS, in one assembly block so that nothing
 * moves across it.
 */
#ifndef NUMKONG_EMULATION_DOT_MODEL_H
#define NUMKONG_EMULATION_DOT_MODEL_H

/* The even or the odd bytes, widened to 16 bits. */
static inline __m256i nk_model_widen_(__m256i bytes, int odd, int is_signed) {
    __m256i const high = odd ? bytes : _mm256_slli_epi16(bytes, 8);
    return is_signed ? _mm256_srai_epi16(high, 8) : _mm256_srli_epi16(high, 8);
}

/* sums + four products of bytes per lane, of any signs: what VPDPBUSD and the tile products of bytes do. */
static inline __m256i nk_model_dot_bytes_(__m256i sums, __m256i left, int left_signed, __m256i right,
                                          int right_signed) {
    __m256i const even =
        _mm256_madd_epi16(nk_model_widen_(left, 0, left_signed), nk_model_widen_(right, 0, right_signed));
    __m256i const odd =
        _mm256_madd_epi16(nk_model_widen_(left, 1, left_signed), nk_model_widen_(right, 1, right_signed));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}

static inline __m256i nk_model_dpbusd_(__m256i sums_i32x8, __m256i unsigned_u8x32, __m256i signed_i8x32) {
    return nk_model_dot_bytes_(sums_i32x8, unsigned_u8x32, 0, signed_i8x32, 1);
}

/* Flush to zero, denormals are zero, round to nearest even, every exception masked. */
#define NK_MODEL_FLUSHING_MXCSR_ 0x9FC0u

static inline __m256 nk_model_flushing_fmadd_(__m256 left_f32x8, __m256 right_f32x8, __m256 sums_f32x8) {
    unsigned const flushing = NK_MODEL_FLUSHING_MXCSR_;
    unsigned const caller = _mm_getcsr();
    __asm__ volatile(
        "vldmxcsr %[flushing]\n\t"
        "vfmadd231ps %[right], %[left], %[sums]\n\t"
        "vldmxcsr %[caller]"
        : [sums] "+x"(sums_f32x8)
        : [left] "x"(left_f32x8), [right] "x"(right_f32x8), [flushing] "m"(flushing), [caller] "m"(caller));
    return sums_f32x8;
}

static inline __m256 nk_model_dpbf16_(__m256 sums_f32x8, __m256i left_bf16x16, __m256i right_bf16x16) {
    __m256i const high_mask = _mm256_set1_epi32((int)0xFFFF0000u);
    __m256 const left_odd_f32x8 = _mm256_castsi256_ps(_mm256_and_si256(left_bf16x16, high_mask));
    __m256 const right_odd_f32x8 = _mm256_castsi256_ps(_mm256_and_si256(right_bf16x16, high_mask));
    __m256 const left_even_f32x8 = _mm256_castsi256_ps(_mm256_slli_epi32(left_bf16x16, 16));
    __m256 const right_even_f32x8 = _mm256_castsi256_ps(_mm256_slli_epi32(right_bf16x16, 16));
    sums_f32x8 = nk_model_flushing_fmadd_(left_odd_f32x8, right_odd_f32x8, sums_f32x8);
    return nk_model_flushing_fmadd_(left_even_f32x8, right_even_f32x8, sums_f32x8);
}

#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32(sums, unsigned_bytes, signed_bytes) nk_model_dpbusd_(sums, unsigned_bytes, signed_bytes)

#if NK_MODEL_AVX512
static inline __m512i nk_model_dpbusd_512_(__m512i sums_i32x16, __m512i unsigned_u8x64, __m512i signed_i8x64) {
    __m256i const low_i32x8 = nk_model_dpbusd_(nk_model_half_(sums_i32x16, 0), nk_model_half_(unsigned_u8x64, 0),
                                               nk_model_half_(signed_i8x64, 0));
    __m256i const high_i32x8 = nk_model_dpbusd_(nk_model_half_(sums_i32x16, 1), nk_model_half_(unsigned_u8x64, 1),
                                                nk_model_half_(signed_i8x64, 1));
    return nk_model_join_(low_i32x8, high_i32x8);
}

static inline __m512 nk_model_dpbf16_512_(__m512 sums_f32x16, __m512i left_bf16x32, __m512i right_bf16x32) {
    __m512i const sums_i32x16 = (__m512i)sums_f32x16;
    __m256 const low_f32x8 = nk_model_dpbf16_((__m256)nk_model_half_(sums_i32x16, 0), nk_model_half_(left_bf16x32, 0),
                                              nk_model_half_(right_bf16x32, 0));
    __m256 const high_f32x8 = nk_model_dpbf16_((__m256)nk_model_half_(sums_i32x16, 1), nk_model_half_(left_bf16x32, 1),
                                               nk_model_half_(right_bf16x32, 1));
    return (__m512)nk_model_join_((__m256i)low_f32x8, (__m256i)high_f32x8);
}

#undef _mm256_dpbusd_epi32
#define _mm256_dpbusd_epi32(sums, unsigned_bytes, signed_bytes) nk_model_dpbusd_(sums, unsigned_bytes, signed_bytes)
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32(sums, unsigned_bytes, signed_bytes) nk_model_dpbusd_512_(sums, unsigned_bytes, signed_bytes)
#undef _mm256_dpbf16_ps
#define _mm256_dpbf16_ps(sums, left, right) nk_model_dpbf16_(sums, (__m256i)(left), (__m256i)(right))
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sums, left, right) nk_model_dpbf16_512_(sums, (__m512i)(left), (__m512i)(right))
#endif

#endif
