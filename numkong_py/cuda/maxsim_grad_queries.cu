// Gradient by the queries from the forward's winners: dQ[i] = sum over slots of g D[winner], gathered, no atomics.
//
// A group of lanes owns a query token and keeps 4 or 8 document rows in flight; winners and weights of CHUNK slots are staged for the whole
// CTA while the rows of the CHUNK before arrive. Order of the sum: slots ascending within slices of `slice_slots`, then the slices ascending.
// Slices depend on the number of slots alone, so that the bits do not depend on the other queries; few query tokens give each slice a CTA
// of its own, which leaves f32 sums in `partial`, and maxsim_grad_slices adds those up in the same order.
#include "gather.cuh"

constexpr int ENTRIES = 1024, CHUNK = ENTRIES / GROUPS, FETCH = ENTRIES / GATHER_THREADS;

struct Params {
    Tokens queries, documents;
    Gradient out;
    const i64* candidates;  // [queries, slots] or null; outside the documents: none
    const int* argmax;      // [queries, slots, longest query]; negative: none
    const float* weights;   // [queries, slots]
    float* partial;         // [slices, queries x longest query, passes x COLUMNS] or null
    int slots, slice_slots, pairs;
};

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, DTYPE == 2 || COSINE ? 2 : 3) maxsim_grad_queries(const __grid_constant__ Params p) {
    __shared__ u32 token[2][ENTRIES];  // [slot of the chunk][row]
    __shared__ float weight[2][ENTRIES];
    __shared__ float slices[8][GATHER_THREADS];  // the sum of earlier slices, out of the registers' way
    const int lane = threadIdx.x & (LANES - 1), group = threadIdx.x / LANES;
    const int begin_row = blockIdx.x * GROUPS, rows = (int)p.queries.sets * p.queries.length;
    const int begin = p.partial ? blockIdx.y * p.slice_slots : 0, end = p.partial ? min(p.slots, begin + p.slice_slots) : p.slots;

    const int staged_row = begin_row + threadIdx.x % GROUPS, staged_query = staged_row / p.queries.length;  // what this thread fetches for
    const int staged_position = staged_row - staged_query * p.queries.length;
    u32 next_token[FETCH];
    float next_weight[FETCH];
    auto fetch = [&](int chunk) {  // in stages, so that the loads of each are in flight together
        int winner[FETCH], document[FETCH];
#pragma unroll
        for (int k = 0; k < FETCH; ++k) {
            const int slot = chunk + threadIdx.x / GROUPS + k * (GATHER_THREADS / GROUPS);
            const bool inside = staged_row < rows & slot < end;
            const u32 pair = inside ? (u32)staged_query * p.slots + slot : 0;
            winner[k] = -1, next_weight[k] = 0.0f;
            if (inside) winner[k] = __ldg(p.argmax + (u64)pair * (u32)p.queries.length + staged_position);
            if (inside) next_weight[k] = __ldg(p.weights + pair);
            document[k] = p.pairs ? staged_query : slot;
            if (p.candidates) {
                const i64 named = __ldg(p.candidates + pair);
                document[k] = (u64)named < (u64)p.documents.sets ? (int)named : -1;
            }
        }
#pragma unroll
        for (int k = 0; k < FETCH; ++k) {
            const bool met = (u32)document[k] < (u32)p.documents.sets;
            document[k] = met ? document[k] : 0;
            const bool there = met & next_weight[k] != 0.0f & (u32)winner[k] < (u32)p.documents.count(document[k]);
            next_token[k] = there ? (u32)(p.documents.start(document[k]) + winner[k]) : NOTHING;
            if (!there) next_weight[k] = 0.0f;
        }
        if (COSINE)
#pragma unroll
            for (int k = 0; k < FETCH; ++k)
                if (next_token[k] != NOTHING) next_weight[k] *= inverse_norm(p.documents.squares[next_token[k]]);
    };
    auto sum_of_pass = [&](int first, float (&sum)[8]) {
        clear(sum);
        fetch(begin);
        int buffer = 0;
#pragma unroll 1
        for (int chunk = begin; chunk < end; chunk += CHUNK, buffer ^= 1) {
#pragma unroll
            for (int k = 0; k < FETCH; ++k) {
                token[buffer][threadIdx.x + GATHER_THREADS * k] = next_token[k];
                weight[buffer][threadIdx.x + GATHER_THREADS * k] = next_weight[k];
            }
            __syncthreads();
            if (chunk + CHUNK < end) fetch(chunk + CHUNK);
            if (chunk > begin && (chunk - begin) % p.slice_slots == 0) {
#pragma unroll
                for (int x = 0; x < 8; ++x) slices[x][threadIdx.x] = chunk - begin > p.slice_slots ? slices[x][threadIdx.x] + sum[x] : sum[x];
                clear(sum);
            }
            const int count = min(CHUNK, end - chunk);
#pragma unroll 1
            for (int slot = 0; slot < count; slot += FLIGHT) {
                Piece v[FLIGHT];
#pragma unroll
                for (int u = 0; u < FLIGHT; ++u) {
                    const u32 row = token[buffer][(slot + u) * GROUPS + group];
                    v[u] = load_piece(p.documents, row, first, lane);
                }
#pragma unroll
                for (int u = 0; u < FLIGHT; ++u) add_piece(sum, v[u], weight[buffer][(slot + u) * GROUPS + group]);
            }
        }
        if (end - begin > p.slice_slots)
#pragma unroll
            for (int x = 0; x < 8; ++x) sum[x] = slices[x][threadIdx.x] + sum[x];
        __syncthreads();  // the next pass stages into the buffers
    };

    const int row = begin_row + group, query = row < rows ? row / p.queries.length : 0;
    const int position = row < rows ? row - query * p.queries.length : 0, count = row < rows ? p.queries.count(query) : 0;
    const bool valid = position < count;
    const int passes = (p.out.depth + COLUMNS - 1) / COLUMNS;
    if (!p.partial && row < rows && (valid || position == 0)) store_padding(p.out, p.queries, query, position, count, passes, lane);
    const i64 out_row = valid ? row_of(p.out, p.queries, query, first_row(p.out, p.queries, query), position) : 0;
    float sum[8];
#if COSINE
    const i64 mine = valid ? p.queries.start(query) + position : 0;
    const float inverse = valid && !p.partial ? inverse_norm(p.queries.squares[mine]) : 0.0f;
    const int projecting = p.partial ? 0 : passes;
    float along = 0.0f;
    bool any = false;
    // Deep rows need u . S before the first column can be stored: everything twice, rather than memory for S.
    for (int step = passes > 1 ? -projecting : 0; step < passes; ++step) {
        const int pass = step < 0 ? step + passes : step;
        sum_of_pass(pass * COLUMNS, sum);
        if (projecting && (step < 0 || passes == 1)) {
            along += valid ? projection_share(sum, load_piece(p.queries, (u32)mine, pass * COLUMNS, lane), inverse) : 0.0f;
            any |= any_nonzero(sum);
            if (pass + 1 == passes) along = group_sum(along), any = group_sum(any ? 1.0f : 0.0f) != 0.0f;
            if (step < 0) continue;
        }
        if (projecting && valid) project(sum, load_piece(p.queries, (u32)mine, pass * COLUMNS, lane), inverse, along, any);
#else
    for (int pass = 0; pass < passes; ++pass) {
        sum_of_pass(pass * COLUMNS, sum);
#endif
        if (p.partial) {
            if (row >= rows) continue;
            float4* to = reinterpret_cast<float4*>(p.partial + (((i64)blockIdx.y * rows + row) * passes + pass) * COLUMNS) + 2 * lane;
            to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        } else if (valid) {
            store_piece(p.out, sum, out_row, pass * COLUMNS, lane);
        }
    }
}
