// Gradient by the documents from the forward's winners: dD[t] = sum of g Q[i] over the query tokens i that t won. No atomics, no zero fill.
//
// A CTA owns `owned_rows` neighbouring tokens of a document and writes each of their rows once. It reads the winners of all query tokens that
// met the document, keeps its own (inverse.cuh) and adds query rows in f32, a group of lanes a token, in ascending order of the query token;
// tokens with more than HEAVY sources in a batch are summed by all groups, whose partial sums are added in order.
// Without BATCHED everything fits one batch (at most BATCH query tokens a document) and sums go straight to their rows. LISTED: candidates.
// DIFFERENCE, the Chamfer distance: rows are own - source, and a token's own nearest neighbour adds one more. As for pairs, with a winner a
// token of the collection, without padding.
#include "gather.cuh"
#include "inverse.cuh"

constexpr int HEAVY = 96;        // 64x64,1024x1024: 64 sources a token on average
constexpr int RESIDENT = DIFFERENCE || COSINE ? 2 : 3;  // CTAs a multiprocessor: as many as their registers let in
constexpr int TAKEN = DIFFERENCE ? FLIGHT / 2 : FLIGHT;    // rows of a group in flight

struct Params {
    Tokens queries, documents;
    Gradient out;
    const int* argmax;       // [queries, slots, longest query]; negative: none. Null: nothing won
    const float* weights;    // [queries, slots]
    const u32* list;         // candidates only: pairs (query x slots + slot) by document, and
    const u32* list_begin;   // where each document's begin, [documents + 1]
    // DIFFERENCE: squares of plain distances, or null, of the queries' tokens and of the documents'; the documents' winners and weights
    const double* query_distances;
    const double* own_distances;
    const int* own_nearest;
    const float* own_weights;
    Divisor query_length, slot_count;
    int by_fours;            // winners lie in aligned fours, none of which crosses a query's end
    int parts, owned_rows, slots, pairs;
};

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, RESIDENT) maxsim_grad_documents(const __grid_constant__ Params p) {
#if BATCHED
    extern __shared__ float4 sums[];  // [owned_rows][passes][LANES][2]
#endif
    __shared__ Inverse map;
    const int lane = threadIdx.x & (LANES - 1), group = threadIdx.x / LANES;
    const int passes = (p.out.depth + COLUMNS - 1) / COLUMNS;
    const int document = blockIdx.x / p.parts, part = blockIdx.x - document * p.parts, count = p.documents.count(document);
    if (count == 0 && part == 0 && group == 0) store_padding(p.out, p.documents, document, 0, 0, passes, lane);
    const int used_parts = (count + p.owned_rows - 1) / p.owned_rows;
    if (part >= used_parts) return;
    const int each = (count + used_parts - 1) / used_parts, first = part * each, owned = min(each, count - first);
    if (owned <= 0) return;
    const u32 start = (u32)(p.documents.start(document) + first);
    const i64 first_out = first_row(p.out, p.documents, document) + first;
    const i64* const places = p.out.places ? p.out.places + (start - p.documents.first()) : nullptr;
    for (int local = group; p.out.length && local < owned; local += GROUPS) store_padding(p.out, p.documents, document, first + local, count, passes, lane);

#if LISTED
    const u32* const list = p.list + p.list_begin[document];
    const int met = p.list_begin[document + 1] - p.list_begin[document];
    auto pair_of = [&](u32 i) { return __ldg(list + i); };
#else
    const int met = p.pairs ? 1 : (int)p.queries.sets;
    auto pair_of = [&](u32 i) { return i * (u32)p.slots + document; };
#endif
    const int sources = !p.argmax ? 0 : DIFFERENCE ? p.queries.count(document) : met * p.queries.length;
    struct Found {
        u32 token;
        float weight;
#if COSINE || DIFFERENCE
        double square;  // whose root the weight is divided by
#endif
    };
    auto look = [&](u32 source) {
        const u32 i = p.query_length.quotient(source), position = source - i * p.query_length.by, pair = pair_of(i);
        const u32 query = LISTED ? p.slot_count.quotient(pair) : p.pairs ? document : i;
        Found found;
        found.token = (p.queries.offsets ? (u32)p.queries.offsets[query] : query * p.queries.length) + position;
        found.weight = __ldg(p.weights + pair);
#if COSINE
        found.square = p.queries.squares[found.token];
#elif DIFFERENCE
        found.square = p.query_distances ? p.query_distances[found.token - (u32)p.queries.first()] : 0.25;  // 2 (own - source)
#endif
        return found;
    };
    auto weigh = [&](const Found& found, u32& row, float& weight) {
        row = found.weight == 0.0f ? NOTHING : found.token;
        weight = found.weight;
#if COSINE || DIFFERENCE
        if (row != NOTHING) weight *= inverse_norm(found.square);
#endif
    };
    int winner[EACH];
    const int* const winners = DIFFERENCE ? p.argmax + (p.queries.start(document) - p.queries.first()) : p.argmax;
    auto winner_of = [&](u32 source) {
        if (DIFFERENCE) return winners + source;
        const u32 i = p.query_length.quotient(source);
        return winners + ((u64)pair_of(i) * p.query_length.by + (source - i * p.query_length.by));
    };
    auto fetch = [&](int base) {
#pragma unroll
        for (int k = 0; k < TURNS; ++k) {
            const int source = base + 4 * (k * MAP_THREADS + threadIdx.x);
            if (p.by_fours) {
                int4 four = make_int4(-1, -1, -1, -1);
                if (source < sources) four = __ldg(reinterpret_cast<const int4*>(winner_of(source)));
                winner[4 * k] = four.x, winner[4 * k + 1] = four.y, winner[4 * k + 2] = four.z, winner[4 * k + 3] = four.w;
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                winner[4 * k + j] = -1;
                if (source + j < sources) winner[4 * k + j] = __ldg(winner_of(source + j));
            }
        }
    };

    // ------------------------------------------------------------ rows of a sorted batch
    struct Taken {
        Piece source;
#if DIFFERENCE
        Piece own;
#endif
    };
    auto take = [&](int i, int end, int column) {
        Taken t;
        const u32 row = i < end ? map.source[i] : NOTHING;
        t.source = load_piece(p.queries, row, column, lane);
#if DIFFERENCE
        t.own = load_piece(p.documents, row == NOTHING ? NOTHING : start + map.owner[i], column, lane);
#endif
        return t;
    };
    auto add = [&](float (&sum)[8], const Taken& t, float weight) {
#if DIFFERENCE
        float own[8], other[8];
        unpack(t.own, own), unpack(t.source, other);
#pragma unroll
        for (int x = 0; x < 8; ++x) sum[x] = fmaf(weight, own[x] - other[x], sum[x]);
#else
        add_piece(sum, t.source, weight);
#endif
    };
    auto add_run = [&](float (&sum)[8], int begin, int end, int column) {
#pragma unroll 1
        for (int i = begin; i < end; i += TAKEN) {
            Taken t[TAKEN];
#pragma unroll
            for (int u = 0; u < TAKEN; ++u) t[u] = take(i + u, end, column);
#pragma unroll
            for (int u = 0; u < TAKEN; ++u) add(sum, t[u], i + u < end ? map.weight[i + u] : 0.0f);
        }
    };
    // ------------------------------------------------------------ a finished row
    auto store = [&](int local, float (&sum)[8], int column) {
        store_piece(p.out, sum, places ? places[local] : first_out + local, column, lane);
    };
    auto finish = [&](int local, float (&sum)[8], int column) {  // all columns in one pass, or nothing to project
#if DIFFERENCE
        const i64 mine = start + local - p.documents.first();
        const int nearest = p.own_nearest ? p.own_nearest[mine] : -1;
        const float g = p.own_weights ? p.own_weights[document] : 0.0f;
        if (nearest >= 0 && g != 0.0f) {
            Taken t;
            t.source = load_piece(p.queries, (u32)p.queries.start(document) + nearest, column, lane);
            t.own = load_piece(p.documents, start + local, column, lane);
            add(sum, t, g * (p.own_distances ? inverse_norm(p.own_distances[mine]) : 2.0f));
        }
#elif COSINE
        const float inverse = inverse_norm(p.documents.squares[start + local]);
        const Piece own = load_piece(p.documents, start + local, column, lane);
        const float along = group_sum(projection_share(sum, own, inverse));
        project(sum, own, inverse, along, group_sum(any_nonzero(sum) ? 1.0f : 0.0f) != 0.0f);
#endif
        store(local, sum, column);
    };
#if BATCHED
    auto accumulate = [&](int local, const float (&sum)[8], int pass) {
        float4* to = sums + ((local * passes + pass) * LANES + lane) * 2;
        float4 low = to[0], high = to[1];
        low.x += sum[0], low.y += sum[1], low.z += sum[2], low.w += sum[3];
        high.x += sum[4], high.y += sum[5], high.z += sum[6], high.w += sum[7];
        to[0] = low, to[1] = high;
    };
#endif
    // ------------------------------------------------------------ one batch
    auto heavy_rows = [&](int pass) {  // every group a share, partial sums through the free list
        float* const partial = reinterpret_cast<float*>(map.list);
        for (int local = 0; local < owned; ++local) {
            const int begin = map.start[local], length = map.start[local + 1] - begin;
            if (length <= HEAVY) continue;
            float sum[8];
            clear(sum);
            add_run(sum, begin + length * group / GROUPS, begin + length * (group + 1) / GROUPS, pass * COLUMNS);
#pragma unroll
            for (int x = 0; x < 8; ++x) partial[(x * GROUPS + group) * LANES + lane] = sum[x];
            __syncthreads();
            if (group == 0) {
                clear(sum);
                for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                    for (int x = 0; x < 8; ++x) sum[x] += partial[(x * GROUPS + g) * LANES + lane];
#if BATCHED
                accumulate(local, sum, pass);
#else
                finish(local, sum, pass * COLUMNS);
#endif
            }
            __syncthreads();
        }
    };
#if BATCHED
    for (int i = threadIdx.x; i < owned * passes * LANES * 2; i += GATHER_THREADS) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    auto batch = [&](int length) {
        const bool heavy = map.sort<Found>(length, HEAVY, look, weigh);
        for (int unit = group; unit < owned * passes; unit += GROUPS) {
            const int local = unit / passes, pass = unit - local * passes;
            const int begin = map.start[local], end = map.start[local + 1];
            if (begin == end || end - begin > HEAVY) continue;
            float sum[8];
            clear(sum);
            add_run(sum, begin, end, pass * COLUMNS);
            accumulate(local, sum, pass);
        }
        __syncthreads();
        if (!heavy) return;
        for (int pass = 0; pass < passes; ++pass) heavy_rows(pass);
    };
    fetch(0);
    int length = 0, parity = 0;
    for (int base = 0; base < sources; base += WINDOW, parity ^= 1) {
        int current[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) current[k] = winner[k];
        fetch(base + WINDOW);
        length = map.append(current, base, sources, first, owned, length, parity);
        const bool last = base >= sources - WINDOW;
        while (length >= BATCH || (last && length)) {
            batch(min(length, BATCH));
            length = map.drop_batch(length);
            fetch(base + WINDOW);  // again, rather than held in registers during the batch
        }
    }
    __syncthreads();
    for (int local = group; local < owned; local += GROUPS) {
        auto load = [&](int pass, float (&sum)[8]) {
            const float4* from = sums + ((local * passes + pass) * LANES + lane) * 2;
            const float4 low = from[0], high = from[1];
            sum[0] = low.x, sum[1] = low.y, sum[2] = low.z, sum[3] = low.w;
            sum[4] = high.x, sum[5] = high.y, sum[6] = high.z, sum[7] = high.w;
        };
        float sum[8];
#if COSINE
        if (passes > 1) {
        const float inverse = inverse_norm(p.documents.squares[start + local]);
        float along = 0.0f;
        bool any = false;
        for (int pass = 0; pass < passes; ++pass) {
            load(pass, sum);
            along += projection_share(sum, load_piece(p.documents, start + local, pass * COLUMNS, lane), inverse);
            any |= any_nonzero(sum);
        }
        along = group_sum(along), any = group_sum(any ? 1.0f : 0.0f) != 0.0f;
        for (int pass = 0; pass < passes; ++pass) {
            load(pass, sum);
            project(sum, load_piece(p.documents, start + local, pass * COLUMNS, lane), inverse, along, any);
            store(local, sum, pass * COLUMNS);
        }
        continue;
        }
#endif
        for (int pass = 0; pass < passes; ++pass) load(pass, sum), finish(local, sum, pass * COLUMNS);
    }
#else
    fetch(0);
    const int length = map.append(winner, 0, sources, first, owned, 0, 0);
    const bool heavy = map.sort<Found>(length, HEAVY, look, weigh);
    const int each_group = (owned + GROUPS - 1) / GROUPS, low = group * each_group, high = min(owned, low + each_group);
    for (int pass = 0; pass < passes; ++pass) {
        if (heavy) {
            for (int local = low; local < high; ++local) {
                if (map.start[local + 1] - map.start[local] > HEAVY) continue;
                float sum[8];
                clear(sum);
                add_run(sum, map.start[local], map.start[local + 1], pass * COLUMNS);
                finish(local, sum, pass * COLUMNS);
            }
            __syncthreads();
            heavy_rows(pass);
            continue;
        }
        // A group's tokens have neighbouring runs: rows stay in flight across them, however short they are.
        if (low >= high) continue;
        int local = low, run_end = map.start[low + 1];
        const int end = map.start[high];
        float sum[8];
        clear(sum);
#pragma unroll 1
        for (int i = map.start[low]; i < end; i += TAKEN) {
            Taken t[TAKEN];
#pragma unroll
            for (int u = 0; u < TAKEN; ++u) t[u] = take(i + u, end, pass * COLUMNS);
#pragma unroll
            for (int u = 0; u < TAKEN; ++u) {
                while (i + u >= run_end && i + u < end) {
                    finish(local, sum, pass * COLUMNS);
                    clear(sum);
                    run_end = map.start[++local + 1];
                }
                add(sum, t[u], i + u < end ? map.weight[i + u] : 0.0f);
            }
        }
        for (; local < high; ++local) {
            finish(local, sum, pass * COLUMNS);
            clear(sum);
        }
    }
#endif
}
