// Decides f32 winners after a screen: puts the pieces of a document together and takes the f64 dot of the one or two candidates of a row.
//
// Half a warp takes a query token and sixteen documents: a lane looks after one of them, and all lanes together take its dots, four at a
// time, in the contract's 16-lane order. A query element is made f64 (a slow conversion) once for the four. Rows with a third candidate
// are left to maxsim_sm80: argmax -1, and the screen's floor as the value.
#include "ptx.cuh"

constexpr int THREADS = 256, TOGETHER = 16, AT_ONCE = 4;

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
    i64 items;                 // query count x sixteens of documents x query_length
    int document_count, pieces, query_length, depth;
};

DEVICE double fold(double x, u32 mask) {
#pragma unroll
    for (int step = 8; step >= 1; step >>= 1) x += __shfl_xor_sync(mask, x, step);
    return x;
}

// What the pieces of a document say of a query token: its two best tokens, and the value that no other exceeds.
struct Candidates { float value, second, third; int index, second_index; };

DEVICE Candidates candidates_of(const Params& p, i64 query, int document, int position) {
    Candidates c = {negative_infinity(), negative_infinity(), negative_infinity(), 0, 0};
    auto insert = [&](float v, int i) {
        c.third = fmaxf(c.third, fminf(c.second, v));
        if (v > c.value) c.second = c.value, c.second_index = c.index, c.value = v, c.index = i;
        else if (v > c.second) c.second = v, c.second_index = i;
    };
    for (int piece = p.piece_begin[document]; piece < p.piece_begin[document + 1]; ++piece) {
        const i64 at = (query * p.pieces + piece) * p.query_length + position;
        const int base = p.piece_base[piece];
        insert(p.screen_best[at], base + p.screen_index[at]);
        insert(p.screen_second[at], base + p.screen_second_index[at]);
        c.third = fmaxf(c.third, p.screen_third[at]);
    }
    return c;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) refine_f32(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 15, blocks = (p.document_count + TOGETHER - 1) / TOGETHER;
    const u32 mask = threadIdx.x & 16 ? 0xffff0000u : 0xffffu;
    const i64 step = (i64)gridDim.x * (THREADS / 16);
    for (i64 item = (i64)blockIdx.x * (THREADS / 16) + (threadIdx.x >> 4); item < p.items; item += step) {
        const i64 pair = item / p.query_length, query = pair / blocks;
        const int position = (int)(item - pair * p.query_length), document = (int)(pair - query * blocks) * TOGETHER + lane;
        const i64 start = p.query_offsets ? p.query_offsets[query] : query * p.query_length;
        if (p.query_offsets && position >= p.query_offsets[query + 1] - start) continue;
        const float* q = p.queries + (start + position) * p.depth;

        Candidates c = {negative_infinity(), negative_infinity(), negative_infinity(), 0, 0};
        i64 first = 0;
        float floor = 0.0f;
        bool some = document < p.document_count, open = false, rivalled = false;
        if (some) {
            first = p.document_offsets[document];
            some = p.document_offsets[document + 1] > first;
        }
        if (some) {
            c = candidates_of(p, query, document, position);
            const float bound = screen_bound(p.query_sets[query], p.document_sets[document], p.depth);
            floor = c.value - bound;
            open = !(c.third + bound < floor);
            rivalled = !open && !(c.second + bound < floor);
        }

        double mine = 0.0;
        const i64 wanted = some && !open ? first + c.index : -1;
        for (int base = 0; base < TOGETHER; base += AT_ONCE) {
            const float* d[AT_ONCE];
            double dot[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const i64 token = __shfl_sync(mask, wanted, base + u, 16);
                d[u] = token < 0 ? q : p.documents + token * p.depth;
                dot[u] = 0.0;
            }
#pragma unroll 4
            for (int k = lane; k < p.depth; k += 16) {
                const double x = q[k];
#pragma unroll
                for (int u = 0; u < AT_ONCE; ++u) dot[u] = fma(x, (double)d[u][k], dot[u]);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const double sum = fold(dot[u], mask);
                if (lane == base + u) mine = sum;
            }
        }
        int index = c.index;
        u32 rivals = __ballot_sync(mask, rivalled) >> (mask == 0xffffu ? 0 : 16) & 0xffffu;
        while (rivals) {
            const int which = __ffs(rivals) - 1;
            rivals &= rivals - 1;
            const float* d = p.documents + __shfl_sync(mask, first + c.second_index, which, 16) * p.depth;
            double rival = 0.0;
            for (int k = lane; k < p.depth; k += 16) rival = fma((double)q[k], (double)d[k], rival);
            rival = fold(rival, mask);
            if (lane == which && (rival > mine || (rival == mine && c.second_index < index))) mine = rival, index = c.second_index;
        }
        if (!some) continue;
        const i64 at = (query * p.document_count + document) * p.query_length + position;
        p.argmax[at] = open ? -1 : index;
        p.token_scores[at] = open ? (double)fmaxf(floor, negative_infinity()) : mine;
    }
}
