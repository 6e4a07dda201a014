// Decides f32 winners after a screen: puts the pieces of a document together and takes the f64 dot of the one or two candidates of a row.
//
// Half a warp a query token and document, in the contract's 16-lane order; nothing in shared memory, so that many gathers of token rows are
// in flight on every multiprocessor. Rows with a third candidate are left to maxsim_sm80: argmax -1, and the screen's floor as the value.
#include "ptx.cuh"

constexpr int THREADS = 256;

struct Params {
    const float* screen_best;  // [query count, pieces, query_length]; the next four have that shape
    const int* screen_index;
    const float* screen_second;
    const int* screen_second_index;
    const float* screen_third;
    const int* piece_begin;    // documents + 1
    const int* piece_base;     // first token of a piece within its document
    const float* queries;      // [tokens, depth]
    const float* documents;
    const float4* query_sets;  // token_stats.cu
    const float4* document_sets;
    const i64* query_offsets;  // or null
    const i64* document_offsets;
    double* token_scores;      // [query count, documents, query_length]
    int* argmax;
    i64 items;                 // query count x documents x query_length
    int document_count, pieces, query_length, depth;
};

DEVICE double fold(double x, u32 mask) {
#pragma unroll
    for (int step = 8; step >= 1; step >>= 1) x += __shfl_xor_sync(mask, x, step);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) refine_f32(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 15;
    const u32 mask = threadIdx.x & 16 ? 0xffff0000u : 0xffffu;
    const i64 step = (i64)gridDim.x * (THREADS / 16);
    for (i64 item = (i64)blockIdx.x * (THREADS / 16) + (threadIdx.x >> 4); item < p.items; item += step) {
        const i64 pair = item / p.query_length, query = pair / p.document_count;
        const int position = (int)(item - pair * p.query_length), document = (int)(pair - query * p.document_count);
        const i64 start = p.query_offsets ? p.query_offsets[query] : query * p.query_length;
        const int begin = p.piece_begin[document], end = p.piece_begin[document + 1];
        if (p.query_offsets && position >= p.query_offsets[query + 1] - start) continue;
        if (begin == end) continue;  // an empty document
        float value = negative_infinity(), second = value, third = value;
        int index = 0, second_index = 0;
        auto insert = [&](float v, int i) {
            third = fmaxf(third, fminf(second, v));
            if (v > value) second = value, second_index = index, value = v, index = i;
            else if (v > second) second = v, second_index = i;
        };
        for (int piece = begin; piece < end; ++piece) {
            const i64 at = (query * p.pieces + piece) * p.query_length + position;
            const int base = p.piece_base[piece];
            insert(p.screen_best[at], base + p.screen_index[at]);
            insert(p.screen_second[at], base + p.screen_second_index[at]);
            third = fmaxf(third, p.screen_third[at]);
        }
        const float bound = screen_bound(p.query_sets[query], p.document_sets[document], p.depth), floor = value - bound;
        if (!(third + bound < floor)) {
            if (lane == 0) p.argmax[item] = -1, p.token_scores[item] = fmaxf(floor, negative_infinity());
            continue;
        }
        const float* q = p.queries + (start + position) * p.depth;
        const float* d = p.documents + (p.document_offsets[document] + index) * p.depth;
        double best = 0.0;
#pragma unroll 8
        for (int k = lane; k < p.depth; k += 16) best = fma((double)q[k], (double)d[k], best);
        best = fold(best, mask);
        if (!(second + bound < floor)) {
            const float* other = p.documents + (p.document_offsets[document] + second_index) * p.depth;
            double rival = 0.0;
#pragma unroll 8
            for (int k = lane; k < p.depth; k += 16) rival = fma((double)q[k], (double)other[k], rival);
            rival = fold(rival, mask);
            if (rival > best || (rival == best && second_index < index)) best = rival, index = second_index;
        }
        if (lane == 0) p.argmax[item] = index, p.token_scores[item] = best;
    }
}
