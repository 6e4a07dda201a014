/* numkong/xla_ffi.h: what of XLA's foreign-function ABI our JAX custom calls use, declared here so that neither the
 * build nor the binary depends on a jaxlib. Names follow XLA's with our prefix; a test compares every size and offset
 * with the header that the installed jaxlib ships. The handlers report version 0.1 of the ABI: XLA refuses a handler
 * that is newer than itself, and serves older ones. */
#ifndef NUMKONG_XLA_FFI_H
#define NUMKONG_XLA_FFI_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { nk_xla_version_major_k = 0, nk_xla_version_minor_k = 1 };

typedef struct nk_xla_error_t nk_xla_error_t;     /* XLA's, opaque */
typedef struct nk_xla_context_t nk_xla_context_t; /* XLA's, opaque */

typedef struct nk_xla_extension_t {
    size_t struct_size;
    nk_i32_t type; /* nk_xla_extension_metadata_k or one that is newer than this file */
    struct nk_xla_extension_t *next;
} nk_xla_extension_t;
enum { nk_xla_extension_metadata_k = 1 };
enum { nk_xla_stage_execute_k = 3 };

typedef struct nk_xla_version_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_i32_t major_version, minor_version;
} nk_xla_version_t;

typedef struct nk_xla_metadata_t {
    size_t struct_size;
    nk_xla_version_t api_version;
    nk_u32_t traits;
} nk_xla_metadata_t;

typedef struct nk_xla_metadata_extension_t {
    nk_xla_extension_t extension_base;
    nk_xla_metadata_t *metadata;
} nk_xla_metadata_extension_t;

enum { /* absl's status codes */
       nk_xla_invalid_argument_k = 3,
       nk_xla_resource_exhausted_k = 8,
       nk_xla_internal_k = 13,
};

enum { /* xla::PrimitiveType */
       nk_xla_pred_k = 1,
       nk_xla_s32_k = 4,
       nk_xla_s64_k = 5,
       nk_xla_u8_k = 6,
       nk_xla_f16_k = 10,
       nk_xla_f32_k = 11,
       nk_xla_f64_k = 12,
       nk_xla_bf16_k = 16,
};

typedef struct nk_xla_buffer_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_i32_t dtype;
    void *data;
    nk_i64_t rank;
    nk_i64_t *dims;
} nk_xla_buffer_t;

typedef struct nk_xla_scalar_t {
    nk_i32_t dtype;
    void *value;
} nk_xla_scalar_t;

typedef struct nk_xla_span_t {
    char const *ptr;
    size_t len;
} nk_xla_span_t;

/* Arguments, and results too: XLA lays both out alike. */
typedef struct nk_xla_buffers_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_i64_t size;
    nk_i32_t *types;
    nk_xla_buffer_t **buffers;
} nk_xla_buffers_t;

typedef struct nk_xla_attributes_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_i64_t size;
    nk_i32_t *types;
    nk_xla_span_t **names; /* sorted */
    void **attributes;
} nk_xla_attributes_t;

typedef struct nk_xla_error_create_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    char const *message;
    nk_i32_t code;
} nk_xla_error_create_t;

typedef struct nk_xla_error_destroy_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_xla_error_t *error;
} nk_xla_error_destroy_t;

typedef struct nk_xla_schedule_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_xla_context_t *context;
    void (*task)(void *data);
    void *data;
} nk_xla_schedule_t;

typedef struct nk_xla_thread_count_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_xla_context_t *context;
    nk_i64_t *threads;
} nk_xla_thread_count_t;

typedef struct nk_xla_stream_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_xla_context_t *context;
    void *stream;
} nk_xla_stream_t;

typedef struct nk_xla_api_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_xla_version_t api_version;
    void const *internal_api;
    nk_xla_error_t *(*error_create)(nk_xla_error_create_t *);
    void (*error_message)(void *);
    void (*error_destroy)(nk_xla_error_destroy_t *);
    void (*handler_register)(void *);
    nk_xla_error_t *(*stream_get)(nk_xla_stream_t *);
    void (*type_register)(void *);
    void (*context_get)(void *);
    void (*state_set)(void *);
    void (*state_get)(void *);
    void (*memory_allocate)(void *);
    void (*memory_free)(void *);
    nk_xla_error_t *(*schedule)(nk_xla_schedule_t *);
    nk_xla_error_t *(*thread_count)(nk_xla_thread_count_t *);
} nk_xla_api_t;

typedef struct nk_xla_call_frame_t {
    size_t struct_size;
    nk_xla_extension_t *extension_start;
    nk_xla_api_t const *api;
    nk_xla_context_t *context;
    nk_i32_t stage;
    nk_xla_buffers_t arguments;
    nk_xla_buffers_t results;
    nk_xla_attributes_t attributes;
} nk_xla_call_frame_t;

/* How the tokens of one side lie: the values of the attributes `q_layout` and `docs_layout`. */
typedef enum nk_xla_layout_t {
    nk_xla_layout_full_k = 0,    /* tokens [sets, longest, depth], all valid */
    nk_xla_layout_lengths_k = 1, /* the same and lengths [sets] */
    nk_xla_layout_mask_k = 2,    /* the same and mask [sets, longest] */
    nk_xla_layout_spans_k = 3,   /* tokens [total, depth] and spans [sets, 2]: first row and the one after the last */
    nk_xla_layout_packed_k = 4,  /* a packed buffer, bytes */
} nk_xla_layout_t;

/* Which results beside the scores a call has, in this order: bits of the attribute `outputs`. */
typedef enum nk_xla_output_t {
    nk_xla_output_argmax_k = 1,
    nk_xla_output_token_scores_k = 2,
    nk_xla_output_bounds_k = 4,
    nk_xla_output_places_k = 8, /* argmax counts rows of the input instead of valid tokens, on both sides */
} nk_xla_output_t;

/* Scores. Arguments: queries, documents (each followed by its lengths, mask or spans), candidates if there are any.
 */
NK_PUBLIC nk_xla_error_t *nk_xla_maxsim(nk_xla_call_frame_t *frame);
/* Gradient of the tokens of one side (`of_documents`), in their layout and type. Arguments: the upstream gradient, the
 * argmax of a call with nk_xla_output_places_k, and those of that call. */
NK_PUBLIC nk_xla_error_t *nk_xla_maxsim_gradient(nk_xla_call_frame_t *frame);
/* Nearest of the others for every point, int32, -1 in an empty set. Arguments: points, others, as many sets. */
NK_PUBLIC nk_xla_error_t *nk_xla_nearest(nk_xla_call_frame_t *frame);
/* Calls of any of the handlers that have computed something, since the process started; for tests. */
NK_PUBLIC nk_u64_t nk_xla_calls(void);
/* Address of the first argument's data in the last call, for tests that no copy is made. */
NK_PUBLIC nk_u64_t nk_xla_last_address(void);

#ifdef __cplusplus
}
#endif
#endif
