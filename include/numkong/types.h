/* numkong/types.h: integer and float aliases, dtypes, statuses, metrics and kernel kinds shared by every other header.
 */
#ifndef NUMKONG_TYPES_H
#define NUMKONG_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define NK_PUBLIC __declspec(dllexport)
#elif defined(__GNUC__)
#define NK_PUBLIC __attribute__((visibility("default")))
#else
#define NK_PUBLIC
#endif

typedef uint8_t nk_u8_t;
typedef int8_t nk_i8_t;
typedef uint16_t nk_u16_t;
typedef int16_t nk_i16_t;
typedef uint32_t nk_u32_t;
typedef int32_t nk_i32_t;
typedef uint64_t nk_u64_t;
typedef int64_t nk_i64_t;
typedef float nk_f32_t;
typedef double nk_f64_t;
typedef uint16_t nk_bf16_t; /* the bits of a bfloat16 */
typedef uint16_t nk_f16_t;  /* the bits of an IEEE binary16 */
typedef uint64_t nk_size_t;
typedef void *nk_stream_t; /* a CUDA stream for device rows; must be null for CPU rows */

/* Element types. The values are stored in packed headers and never change. */
typedef enum nk_dtype_t {
    nk_dtype_unknown_k = 0,
    nk_f64_k = 1,
    nk_f32_k = 2,
    nk_f16_k = 3,
    nk_bf16_k = 4,
} nk_dtype_t;

/* Outcomes. Zero is done; a negative value means that nothing was written. Values to -22 are NumKong 8's. */
typedef enum nk_status_t {
    nk_success_k = 0,
    nk_bad_alloc_k = -10,
    nk_unexpected_dimensions_k = -15,
    nk_missing_gpu_k = -16,
    nk_device_code_k = -17,
    nk_device_memory_k = -18,
    nk_missing_kernel_k = -19,
    nk_misaligned_k = -20,
    nk_pack_mismatch_k = -21,
    nk_missing_library_k = -22,
    nk_null_argument_k = -65,
    nk_size_overflow_k = -66,
    nk_unknown_metric_k = -67,
    nk_index_out_of_range_k = -68,
    nk_bad_capability_name_k = -69,
} nk_status_t;

/* What a score means; docs/numerics.md has the definitions. */
typedef enum nk_metric_t {
    nk_metric_dot_k = 0,     /* sum of maximal inner products, higher is better */
    nk_metric_cosine_k = 1,  /* the same over normalised vectors */
    nk_metric_angular_k = 2, /* sum of minimal max(0, 1 - cosine), lower is better */
} nk_metric_t;

typedef enum nk_kernel_kind_t {
    nk_kernel_unknown_k = 0,
    nk_kernel_maxsim_pack_size_k = 1,
    nk_kernel_maxsim_packed_shape_k = 2,
    nk_kernel_maxsim_pack_k = 3,
    nk_kernel_maxsim_packed_k = 4,
    nk_kernel_maxsim_corpus_k = 5,
    nk_kernel_maxsim_unpack_k = 6,
} nk_kernel_kind_t;

typedef void (*nk_kernel_punned_t)(void); /* cast to the signature of the kind that was asked for */

NK_PUBLIC char const *nk_status_name(nk_status_t status);     /* "pack_mismatch" */
NK_PUBLIC char const *nk_status_sentence(nk_status_t status); /* what happened and what to do */

#ifdef __cplusplus
}
#endif
#endif
