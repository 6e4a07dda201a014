// Token rows in pieces of eight columns a lane: how the gradient kernels load, weigh, project and store them.
// A group of LANES lanes takes COLUMNS columns of a row at a time; a deeper row takes several passes.
//   16-bit types:        lane l holds columns 8 l .. 8 l + 7               (one 16-byte load)
//   f32, VECTOR:         4 l .. 4 l + 3 and 4 (LANES + l) .. + 3           (two)
//   f32, rows unaligned: l, l + LANES, l + 2 LANES, ...                    (eight scalars)
// Compiled by DTYPE (0 bf16, 1 f16, 2 f32), LANES (8 up to depth 64, else 16), VECTOR (rows of the gradient, and of f32 tokens, start on 16
// bytes), OUT_F32 (the gradient's type, or the tokens') and COSINE.
#pragma once
#include "ptx.cuh"

constexpr int GATHER_THREADS = 256, GROUPS = GATHER_THREADS / LANES, COLUMNS = 8 * LANES;
constexpr int FLIGHT = DTYPE != 2 ? 8 : VECTOR ? 4 : 2;  // rows a group has in flight
constexpr u32 NOTHING = FULL_WARP;          // no row: a token is a 32-bit number below it

#if DTYPE == 2
typedef float Element;
struct Piece { float x[8]; };
#else
typedef u16 Element;
struct Piece { uint4 bits; };
#endif

// One side of the pairs: token rows, and where each set starts.
struct Tokens {
    const Element* rows;  // [tokens, stride]
    const double* squares;  // [tokens], cosine only
    const i64* offsets;  // or null: `length` tokens a set
    i64 sets;
    int length, stride;  // of the longest set; elements a row
    DEVICE i64 start(i64 set) const { return offsets ? offsets[set] : set * length; }
    DEVICE int count(i64 set) const { return offsets ? (int)(offsets[set + 1] - offsets[set]) : length; }
    DEVICE i64 first() const { return offsets ? offsets[0] : 0; }
};
// Where the gradient of one side goes: flat, or padded to `length` rows a set, valid tokens at their places and zeros elsewhere.
struct Gradient {
    void* rows;         // [rows, depth]
    const i64* places;  // row of every valid token; null: side by side from the start of the set
    int length;         // 0: flat
    int depth;
};

DEVICE int column(int lane, int x) {
#if DTYPE != 2
    return 8 * lane + x;
#elif VECTOR
    return (x < 4 ? 4 * lane : 4 * (LANES + lane) - 4) + x;
#else
    return x * LANES + lane;
#endif
}
// Loads under a predicate rather than behind a branch, so that those of a flight are issued together; zeros where there is nothing.
DEVICE uint4 load_16_bytes(const void* from, bool there) {
    uint4 r;
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\tmov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
        "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w) : "l"(from), "r"((u32)there));
    return r;
}
DEVICE float load_f32(const void* from, bool there) {
    float r;
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.f32 %0, 0f00000000;\n\t@p ld.global.nc.f32 %0, [%1];\n\t}"
        : "=&f"(r) : "l"(from), "r"((u32)there));
    return r;
}
// Columns from `first` on; those beyond the row are zeros, and NOTHING is a row of zeros. 16-bit rows end in zeros up to a multiple of
// eight columns.
DEVICE Piece load_piece(const Tokens& tokens, u32 token, int first, int lane) {
    const Element* row = tokens.rows + (u64)token * (u32)tokens.stride + first;
    const int left = token == NOTHING ? 0 : tokens.stride - first;
    Piece v;
#if DTYPE != 2
    v.bits = load_16_bytes(row + 8 * lane, 8 * lane < left);
#elif VECTOR
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 q = load_16_bytes(row + 4 * (half * LANES + lane), 4 * (half * LANES + lane) < left);
        v.x[4 * half] = __uint_as_float(q.x), v.x[4 * half + 1] = __uint_as_float(q.y);
        v.x[4 * half + 2] = __uint_as_float(q.z), v.x[4 * half + 3] = __uint_as_float(q.w);
    }
#else
#pragma unroll
    for (int x = 0; x < 8; ++x) v.x[x] = load_f32(row + x * LANES + lane, x * LANES + lane < left);
#endif
    return v;
}
DEVICE void unpack(const Piece& v, float (&x)[8]) {
#if DTYPE == 2
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = v.x[i];
#else
    const u32 words[4] = {v.bits.x, v.bits.y, v.bits.z, v.bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if DTYPE == 0
        x[2 * i] = __uint_as_float(words[i] << 16), x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#else
        asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
            : "=f"(x[2 * i]), "=f"(x[2 * i + 1]) : "r"(words[i]));
#endif
    }
#endif
}
DEVICE void add_piece(float (&sum)[8], const Piece& v, float weight) {
    float x[8];
    unpack(v, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
}
DEVICE void clear(float (&sum)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
}
DEVICE float group_sum(float x) {
    const u32 mask = LANES == 32 ? FULL_WARP : ((1u << LANES) - 1u) << ((threadIdx.x & 31) & ~(LANES - 1));
#pragma unroll
    for (int step = LANES / 2; step >= 1; step >>= 1) x += __shfl_xor_sync(mask, x, step);
    return x;
}

// ---------------------------------------------------------------- cosine
DEVICE float inverse_norm(double square) { return square == 0.0 ? 0.0f : (float)rsqrt(square); }

// With S = sum g_j d_j / |d_j|, the gradient by q is (S - u (u . S)) / |q|, u = q / |q|: the cosines need not be kept.
// `share` is this lane's part of u . S; nothing at all (S = 0) stays nothing, whatever the token holds.
DEVICE float projection_share(const float (&sum)[8], const Piece& own, float inverse) {
    float x[8], share = 0.0f;
    unpack(own, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) share = sum[i] == 0.0f ? share : fmaf(x[i] * inverse, sum[i], share);
    return share;
}
DEVICE void project(float (&sum)[8], const Piece& own, float inverse, float along, bool any) {
    float x[8];
    unpack(own, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = any ? (sum[i] - x[i] * inverse * along) * inverse : 0.0f;
}
DEVICE bool any_nonzero(const float (&sum)[8]) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) any |= !(sum[i] == 0.0f);
    return any;
}

// ---------------------------------------------------------------- stores
DEVICE u16 to_16_bits(float x) {
    u16 r;
#if DTYPE == 1
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
#else
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
    r = (u16)both;
#endif
    return r;
}
DEVICE u32 pair_of_16_bits(float low, float high) {
    u32 r;
#if DTYPE == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}
DEVICE void store_piece(const Gradient& to, const float (&x)[8], i64 row, int first, int lane) {
    const i64 at = row * to.depth + first;
    const int left = to.depth - first;
#if OUT_F32
    float* const rows = static_cast<float*>(to.rows) + at;
#else
    u16* const rows = static_cast<u16*>(to.rows) + at;
#endif
#if !VECTOR
#pragma unroll
    for (int i = 0; i < 8; ++i)
#if OUT_F32
        if (column(lane, i) < left) rows[column(lane, i)] = x[i];
#else
        if (column(lane, i) < left) rows[column(lane, i)] = to_16_bits(x[i]);
#endif
#elif DTYPE == 2
    float4* const vectors = reinterpret_cast<float4*>(rows);
    if (4 * lane < left) vectors[lane] = make_float4(x[0], x[1], x[2], x[3]);
    if (4 * (LANES + lane) < left) vectors[LANES + lane] = make_float4(x[4], x[5], x[6], x[7]);
#else
    if (8 * lane >= left) return;
#if OUT_F32
    float4* const vectors = reinterpret_cast<float4*>(rows) + 2 * lane;
    vectors[0] = make_float4(x[0], x[1], x[2], x[3]), vectors[1] = make_float4(x[4], x[5], x[6], x[7]);
#else
    reinterpret_cast<uint4*>(rows)[lane] = make_uint4(pair_of_16_bits(x[0], x[1]), pair_of_16_bits(x[2], x[3]),
                                                      pair_of_16_bits(x[4], x[5]), pair_of_16_bits(x[6], x[7]));
#endif
#endif
}
// Row of the first valid token of a set where tokens are side by side; and of any, `position` tokens on.
DEVICE i64 first_row(const Gradient& to, const Tokens& own, i64 set) { return to.length ? set * to.length : own.start(set) - own.first(); }
DEVICE i64 row_of(const Gradient& to, const Tokens& own, i64 set, i64 first, int position) {
    return to.places ? to.places[own.start(set) - own.first() + position] : first + position;
}
// Zeros in the padding that follows valid token `position` of a set, before the first one and where there is none.
DEVICE void store_padding(const Gradient& to, const Tokens& own, i64 set, int position, int count, int passes, int lane) {
    if (!to.length) return;
    const i64* places = to.places && count ? to.places + (own.start(set) + position - own.first()) : nullptr;
    const i64 base = set * to.length, place = count == 0 ? -1 : places ? places[0] : base + position;
    const i64 next = position + 1 >= count ? base + to.length : places ? places[1] : place + 1;
    const float zero[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (i64 row = position ? place + 1 : base; row < next; ++row)
        for (int pass = 0; pass < passes && row != place; ++pass) store_piece(to, zero, row, pass * COLUMNS, lane);
}
