// Puts documents together that maxsim_forward_sm90 scored in pieces: the max over the pieces of each token, then the fixed sum.
//
// Pieces let every CTA have the same number of tiles, whatever the documents' lengths, and let a few long documents fill the card.
// One CTA a (document, query); half a warp takes 16 query tokens, so that the sum tree is the forward kernel's, bit for bit.
#include "ptx.cuh"

constexpr int THREADS = 512, HALVES = THREADS / 16, MAX_GROUPS = 64;

struct Params {
    const float* piece_scores;  // [query_count, pieces, query_length]
    const int* piece_argmax;    // same shape, or null
    const int* piece_begin;     // documents + 1
    const int* piece_base;      // first token of a piece within its document
    const i64* query_offsets;   // or null
    const i64* document_offsets;
    float* scores;              // [query_count, documents]
    float* token_scores;        // [query_count, documents, query_length], or null
    int* argmax;                // same shape, or null
    i64 items;
    float empty;
    int mean, documents, pieces, query_length;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) combine(const __grid_constant__ Params p) {
    __shared__ double group_sum[MAX_GROUPS];
    const int half = threadIdx.x >> 4, lane = threadIdx.x & 15;
    const u32 mask = threadIdx.x & 16 ? 0xffff0000u : 0xffffu;
    for (i64 item = blockIdx.x; item < p.items; item += gridDim.x) {
        const i64 query = item / p.documents;
        const int document = (int)(item - query * p.documents);
        const int query_count = p.query_offsets ? (int)(p.query_offsets[query + 1] - p.query_offsets[query]) : p.query_length;
        const i64 count = p.document_offsets[document + 1] - p.document_offsets[document];
        const int begin = p.piece_begin[document], end = p.piece_begin[document + 1];
        double total = 0.0;
        for (int first = 0; first < p.query_length; first += 16 * MAX_GROUPS) {
            const int groups = min(MAX_GROUPS, (p.query_length - first + 15) / 16);
            for (int group = half; group < groups; group += HALVES) {
                const int token = first + 16 * group + lane;
                const bool inside = token < p.query_length, valid = token < query_count;
                float best = negative_infinity();
                int index = 0;
#pragma unroll 4
                for (int piece = begin; inside && piece < end; ++piece) {
                    const i64 at = (query * p.pieces + piece) * p.query_length + token;
                    const float value = p.piece_scores[at];
                    const int found = p.piece_argmax ? p.piece_base[piece] + p.piece_argmax[at] : piece;
                    if (piece == begin || wins(value, found, best, index)) best = value, index = found;
                }
                const i64 at = (query * p.documents + document) * p.query_length + token;
                if (inside && p.token_scores) p.token_scores[at] = !valid ? 0.0f : count > 0 ? best : p.empty;
                if (inside && p.argmax) p.argmax[at] = valid && count > 0 ? index : -1;
                double sum = valid && count > 0 ? (double)best : 0.0;
                sum += __shfl_xor_sync(mask, sum, 8);
#pragma unroll
                for (int step = 1; step <= 4; step <<= 1) sum += __shfl_xor_sync(mask, sum, step);
                if (lane == 0) group_sum[group] = sum;
            }
            __syncthreads();
            if (threadIdx.x == 0)
                for (int group = 0; group < groups; ++group) total += group_sum[group];
            __syncthreads();
        }
        if (threadIdx.x == 0) p.scores[item] = (float)score_of(total, query_count, count, p.mean, p.empty);
    }
}
