/* numkong/gradient.h: backward passes of MaxSim, and the nearest neighbours behind the Chamfer distance. They work on
 * plain tokens in memory; every output row has one owner, so its bits depend neither on threads nor on what else is in
 * the call, and every row of the table gives the same ones. */
#ifndef NUMKONG_GRADIENT_H
#define NUMKONG_GRADIENT_H

#include "capabilities.h"
#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Token sets side by side in memory. */
typedef struct nk_token_sets_t {
    void const *tokens;      /* depth elements of the job's dtype each */
    nk_u64_t const *offsets; /* sets + 1: set b holds tokens offsets[b] .. offsets[b + 1], from 0 */
    nk_size_t sets;
    nk_f64_t const *squares; /* of every token, for cosine and angular: nk_token_squares; else null */
} nk_token_sets_t;

/* Gradients of the scores [query set][column] by the tokens of one side. Without candidates column c is document c;
 * with them it is document candidates[set * columns + c], and -1 is none. Row t of the side's tokens goes to row
 * places[t] of the gradient (null: row t); rows that no token has are left alone. */
typedef struct nk_maxsim_gradient_t {
    nk_u32_t dtype; /* nk_dtype_t of the tokens */
    nk_u32_t metric;
    nk_u32_t mean;         /* 1: the scores were divided by the number of query tokens */
    nk_u32_t of_documents; /* 0: the queries' gradient, 1: the documents' */
    nk_size_t depth;
    nk_token_sets_t queries, documents;
    nk_size_t columns;
    nk_i64_t const *candidates;
    /* For the documents' gradient with candidates, the same turned round: the scores of document b, as set * columns +
     * column and ascending, are listing[listing_offsets[b]] .. listing[listing_offsets[b + 1]]. */
    nk_u64_t const *listing_offsets;
    nk_u64_t const *listing;
    nk_f64_t const *upstream; /* score [set][column] at set * upstream_strides[0] + column * upstream_strides[1] */
    nk_i64_t upstream_strides[2];
    nk_i32_t const *argmax; /* [set][column][token_stride]: the winners, within their document; negative: none */
    nk_size_t token_stride; /* at least the longest query */
    nk_size_t begin, end;   /* whose rows to make: query tokens, or documents */
    nk_u64_t const *places;
    void *gradient; /* rows of depth elements */
    nk_u32_t gradient_dtype;
    nk_u32_t reserved;
} nk_maxsim_gradient_t;

/* Nearest of the others, by the sum of squared differences in f64, for points [begin, end): its place in the set of the
 * same number, the lowest of equals and the lowest NaN first, -1 in an empty set. */
typedef struct nk_nearest_t {
    nk_u32_t dtype;
    nk_u32_t reserved;
    nk_size_t depth;
    nk_token_sets_t points, others; /* as many sets */
    nk_size_t begin, end;
    nk_i32_t *nearest;
    nk_f64_t *squares; /* of the distances; infinite in an empty set */
} nk_nearest_t;

/* Both pick the best row within the capabilities. nk_index_out_of_range_k, nk_unexpected_dimensions_k: a winner, a
 * candidate or an offset lies outside; some of the gradient may have been written. */
NK_PUBLIC nk_status_t nk_maxsim_gradient(nk_maxsim_gradient_t const *job, nk_capability_t capabilities);
NK_PUBLIC nk_status_t nk_nearest(nk_nearest_t const *job, nk_capability_t capabilities);
/* f64 sums of squares of `count` tokens, in the order of a pair value. */
NK_PUBLIC nk_status_t nk_token_squares(nk_dtype_t dtype, void const *tokens, nk_size_t count, nk_size_t depth,
                                       nk_f64_t *squares, nk_capability_t capabilities);

#ifdef __cplusplus
}
#endif
#endif
