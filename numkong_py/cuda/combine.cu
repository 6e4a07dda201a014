// Puts documents together that maxsim_forward_sm90 scored in pieces: the max over the pieces of each token, then the fixed sum.
//
// Pieces let every CTA have the same number of tiles, whatever the documents' lengths, and let a few long documents fill the card.
// Half a warp takes 16 query tokens, so that the sum tree is the forward kernel's, bit for bit. A CTA takes as many (query, document) items
// as it has halves for, or one long query in several rounds: the work is a few loads that wait for one another, so many must be in flight.
#include "ptx.cuh"

constexpr int MAX_THREADS = 1024;

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

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) combine(const __grid_constant__ Params p) {
    __shared__ double group_sum[MAX_THREADS / 16];
    const int halves = blockDim.x / 16, half = threadIdx.x >> 4, lane = threadIdx.x & 15;
    const u32 mask = threadIdx.x & 16 ? 0xffff0000u : 0xffffu;
    const int groups = (p.query_length + 15) / 16, together = max(halves / groups, 1);  // items a CTA
    const int which = groups <= halves ? half / groups : 0;
    for (i64 first = (i64)blockIdx.x * together; first < p.items; first += (i64)gridDim.x * together) {
        const i64 item = first + which;
        const bool some = which < together && item < p.items;
        const i64 query = some ? item / p.documents : 0;
        const int document = some ? (int)(item - query * p.documents) : 0;
        const int query_count = p.query_offsets ? (int)(p.query_offsets[query + 1] - p.query_offsets[query]) : p.query_length;
        const i64 count = p.document_offsets[document + 1] - p.document_offsets[document];
        const int begin = p.piece_begin[document], end = p.piece_begin[document + 1];
        double total = 0.0;
        for (int round = 0; round < groups; round += halves) {
            const int token = 16 * (round + half - which * groups) + lane;
            const bool inside = some && token < p.query_length, valid = inside && token < query_count;
            float best = negative_infinity();
            int index = 0;
#pragma unroll 4
            for (int piece = begin; inside && piece < end; ++piece) {
                const i64 at = (query * p.pieces + piece) * p.query_length + token;
                const float value = p.piece_scores[at];
                const int found = p.piece_argmax ? p.piece_base[piece] + p.piece_argmax[at] : piece;
                if (piece == begin || wins(value, found, best, index)) best = value, index = found;
            }
            const i64 at = item * p.query_length + token;
            if (inside && p.token_scores) p.token_scores[at] = !valid ? 0.0f : count > 0 ? best : p.empty;
            if (inside && p.argmax) p.argmax[at] = valid && count > 0 ? index : -1;
            double sum = valid && count > 0 ? (double)best : 0.0;
            sum += __shfl_xor_sync(mask, sum, 8);
#pragma unroll
            for (int step = 1; step <= 4; step <<= 1) sum += __shfl_xor_sync(mask, sum, step);
            if (lane == 0) group_sum[half] = sum;
            __syncthreads();
            if (some && half == which * groups && lane == 0) {
                const int present = min(groups - round, halves);
#pragma unroll 8
                for (int group = 0; group < present; ++group) total += group_sum[half + group];
            }
            __syncthreads();
        }
        if (some && half == which * groups && lane == 0) p.scores[item] = (float)score_of(total, query_count, count, p.mean, p.empty);
    }
}
