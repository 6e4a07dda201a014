// Adds up the slices that maxsim_grad_queries left, in ascending order, and stores the gradient: a group of lanes a query token.
#include "gather.cuh"

struct Params {
    Tokens queries;
    Gradient out;
    const float* partial;  // [slices, queries x longest query, passes x COLUMNS]
    int slices;
};

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 3) maxsim_grad_slices(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & (LANES - 1);
    const i64 row = (i64)blockIdx.x * GROUPS + threadIdx.x / LANES, rows = p.queries.sets * p.queries.length;
    if (row >= rows) return;
    const i64 query = row / p.queries.length;
    const int position = (int)(row - query * p.queries.length), count = p.queries.count(query);
    const int passes = (p.out.depth + COLUMNS - 1) / COLUMNS;
    if (position >= max(count, 1)) return;
    store_padding(p.out, p.queries, query, position, count, passes, lane);
    if (count == 0) return;
    const i64 out_row = row_of(p.out, p.queries, query, first_row(p.out, p.queries, query), position);
    auto sum_of_pass = [&](int pass, float (&total)[8]) {
        clear(total);
#pragma unroll 4
        for (i64 slice = 0; slice < p.slices; ++slice) {
            const float4* from = reinterpret_cast<const float4*>(p.partial + ((slice * rows + row) * passes + pass) * COLUMNS) + 2 * lane;
            const float4 low = __ldg(from), high = __ldg(from + 1);
            total[0] += low.x, total[1] += low.y, total[2] += low.z, total[3] += low.w;
            total[4] += high.x, total[5] += high.y, total[6] += high.z, total[7] += high.w;
        }
    };
#if COSINE
    const i64 token = p.queries.start(query) + position;
    const float inverse = inverse_norm(p.queries.squares[token]);
    float along = 0.0f;
    bool any = false;
    for (int pass = 0; pass < passes; ++pass) {
        float total[8];
        sum_of_pass(pass, total);
        along += projection_share(total, load_piece(p.queries, (u32)token, pass * COLUMNS, lane), inverse);
        any |= any_nonzero(total);
    }
    along = group_sum(along), any = group_sum(any ? 1.0f : 0.0f) != 0.0f;
#endif
    for (int pass = 0; pass < passes; ++pass) {
        float total[8];
        sum_of_pass(pass, total);
#if COSINE
        project(total, load_piece(p.queries, (u32)token, pass * COLUMNS, lane), inverse, along, any);
#endif
        store_piece(p.out, total, out_row, pass * COLUMNS, lane);
    }
}
