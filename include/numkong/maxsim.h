/* numkong/maxsim.h: the public C entry points. Names and order of arguments are NumKong 8's; the corpus and unpack
 * families are our own. Every function is reentrant, allocates only scratch, prints nothing and never aborts. */
#ifndef NUMKONG_MAXSIM_H
#define NUMKONG_MAXSIM_H

#include "capabilities.h"
#include "packed.h"
#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where the tokens of a collection lie: run r holds counts[r] tokens, the first at pointers[r], the next row_strides[r]
 * bytes further, the elements of one token element_strides[r] bytes apart (strides may be zero or negative). */
typedef struct nk_token_runs_t {
    nk_size_t runs;
    nk_u64_t const *pointers;
    nk_u64_t const *counts;
    nk_i64_t const *row_strides;
    nk_i64_t const *element_strides;
} nk_token_runs_t;

/* A collection to pack: the runs, in order, are the tokens of all documents; offsets[b] .. offsets[b + 1] are document
 * b's. */
typedef struct nk_maxsim_pack_t {
    nk_token_runs_t tokens;
    nk_u64_t const *offsets; /* documents + 1, offsets[0] is 0, non-decreasing; the last is the number of tokens */
    nk_size_t documents;
    nk_size_t depth;
    nk_u32_t normalize; /* 1: store every token divided by its norm (zero tokens stay), rounded to the dtype */
    void *packed;       /* 16-byte aligned, nk_maxsim_pack_size of it */
} nk_maxsim_pack_t;

/* A scoring job: query sets [query_begin, query_end) of one packed collection against documents of another.
 * Without candidates, column c of the outputs is document document_begin + c and there are document_end -
 * document_begin columns. With candidates, column c of query set s is document candidates[(s - query_begin) *
 * candidate_count + c], and -1 is none: it scores like an empty document.
 *
 * With floors, one per query set, a document whose score certainly stays below the floor (above it, for angular) may be
 * left out: it scores -infinity (+infinity), its argmax is -1. So top-k spares what cannot reach it. Query sets of more
 * than nk_floor_tokens_k tokens make no use of theirs, nor do coded documents. */
enum { nk_floor_tokens_k = 32 };
typedef struct nk_maxsim_corpus_t {
    void const *queries;
    void const *documents;
    nk_size_t query_begin, query_end;
    nk_size_t document_begin, document_end; /* ignored with candidates */
    nk_i64_t const *candidates;             /* optional */
    nk_size_t candidate_count;              /* columns per query set */
    nk_u32_t metric;                        /* nk_metric_t */
    nk_u32_t mean;                          /* 1: divide by the number of query tokens */
    nk_u32_t empty_given;                   /* 1: empty documents score empty_value */
    nk_u32_t reserved;
    nk_f64_t empty_value;
    void *scores;           /* output dtype, f32 of coded documents; rows of score_stride elements, one per query set */
    nk_f64_t *bounds;       /* optional, same shape and stride: |score - exact| is at most this */
    nk_i32_t *argmax;       /* optional; element [s][c][i] at (s * score_stride + c) * token_stride + i */
    void *token_scores;     /* optional, output dtype, same shape as argmax */
    nk_size_t score_stride; /* elements between rows of scores and bounds, at least the columns */
    nk_size_t token_stride; /* elements between columns of argmax and token_scores, at least the longest query */
    nk_f64_t const *floors; /* optional, of query sets query_begin .. query_end */
    nk_maxsim_pack_t const *arrays; /* optional, in place of documents, which is then null: they are packed a block at a
                                     * time into scratch and their tokens stay where they are, element beside element
                                     * and each on a multiple of its element's size. Every output is that of the packed
                                     * documents, to the bit. With candidates all of them are one block. */
} nk_maxsim_corpus_t;

/* clang-format off */
#define NK_MAXSIM_DECLARE_(dtype, output)                                                                              \
    NK_PUBLIC nk_status_t nk_maxsim_pack_size_##dtype##_best(nk_size_t vector_count, nk_size_t depth,                  \
                                                             nk_capability_t capabilities, nk_size_t *bytes);          \
    NK_PUBLIC nk_status_t nk_maxsim_packed_shape_##dtype##_best(void const *packed, nk_size_t *vectors,                \
                                                                nk_size_t *depth, nk_capability_t capabilities,        \
                                                                nk_stream_t stream);                                   \
    NK_PUBLIC nk_status_t nk_maxsim_pack_##dtype##_best(nk_##dtype##_t const *vectors, nk_size_t vector_count,         \
                                                        nk_size_t depth, nk_size_t stride, void *packed,               \
                                                        nk_capability_t capabilities, nk_stream_t stream);             \
    NK_PUBLIC nk_status_t nk_maxsim_packed_##dtype##_best(void const *query_packed, void const *document_packed,       \
                                                          nk_size_t query_count, nk_size_t document_count,             \
                                                          nk_size_t depth, output *result,                             \
                                                          nk_capability_t capabilities, nk_stream_t stream);           \
    NK_PUBLIC nk_status_t nk_maxsim_pack_corpus_size_##dtype##_best(nk_size_t documents, nk_size_t tokens,             \
                                                                    nk_size_t depth, nk_capability_t capabilities,     \
                                                                    nk_size_t *bytes);                                 \
    NK_PUBLIC nk_status_t nk_maxsim_pack_corpus_##dtype##_best(nk_maxsim_pack_t const *job,                            \
                                                               nk_capability_t capabilities, nk_stream_t stream);      \
    NK_PUBLIC nk_status_t nk_maxsim_corpus_##dtype##_best(nk_maxsim_corpus_t const *job,                               \
                                                          nk_capability_t capabilities, nk_stream_t stream);           \
    NK_PUBLIC nk_status_t nk_maxsim_unpack_##dtype##_best(void const *packed, nk_size_t token_begin,                   \
                                                          nk_size_t token_end, nk_##dtype##_t *vectors,                \
                                                          nk_capability_t capabilities, nk_stream_t stream);
NK_MAXSIM_DECLARE_(bf16, nk_f32_t)
NK_MAXSIM_DECLARE_(f16, nk_f32_t)
NK_MAXSIM_DECLARE_(f32, nk_f64_t)
#undef NK_MAXSIM_DECLARE_
/* clang-format on */

/* Packs a collection of a dtype with codes in place of its tokens; nk_packed_describe gives its size. Documents that
 * are packed so are scored by nk_maxsim_corpus_<dtype>_best, whose queries may be exact or coded, with f32 scores. */
NK_PUBLIC nk_status_t nk_maxsim_pack_coded(nk_dtype_t dtype, nk_coding_t const *coding, nk_maxsim_pack_t const *job,
                                           nk_capability_t capabilities, nk_stream_t stream);
/* Tokens of a coded packing, scale x code vector in f32, by the row that packed them. */
NK_PUBLIC nk_status_t nk_maxsim_decode(void const *packed, nk_size_t token_begin, nk_size_t token_end,
                                       nk_f32_t *vectors);

/* Type of a score: f32 for bf16 and f16, f64 for f32, unknown for anything else. */
NK_PUBLIC nk_dtype_t nk_maxsim_output_dtype(nk_dtype_t dtype);
/* Relative error coefficient of the output type: 2^-51 for f32 inputs, 2^-22 for bf16 and f16, 0 for anything else. */
NK_PUBLIC nk_f64_t nk_maxsim_error_bound(nk_dtype_t dtype);
/* The kernel that the _best functions would run, and the bits that its row requires. */
NK_PUBLIC nk_status_t nk_maxsim_find_kernel(nk_kernel_kind_t kind, nk_dtype_t dtype, nk_capability_t capabilities,
                                            nk_kernel_punned_t *kernel, nk_capability_t *capability);

#ifdef __cplusplus
}
#endif
#endif
