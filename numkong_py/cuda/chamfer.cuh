// Two batches of point clouds side by side: cloud i of the first is set i, cloud i of the second set `clouds + i`, points in that order.
#pragma once
#include "ptx.cuh"

struct Side {
    const void* points;  // [points, stride]
    const i64* offsets;  // or null: `length` points a cloud
    int length, stride;  // of the longest cloud; elements a point
    DEVICE i64 first() const { return offsets ? offsets[0] : 0; }
    DEVICE i64 start(i64 cloud) const { return offsets ? offsets[cloud] : cloud * length; }
    DEVICE int count(i64 cloud) const { return offsets ? (int)(offsets[cloud + 1] - offsets[cloud]) : length; }
};
struct Clouds {
    Side sides[2];
    i64 points[2];  // of a side
    int clouds, depth;
    DEVICE int count(int set) const { return set < clouds ? sides[0].count(set) : sides[1].count(set - clouds); }
    // First point of a set among all points; set 2 clouds is their number.
    DEVICE i64 start(int set) const {
        if (set == 2 * clouds) return points[0] + points[1];
        return set < clouds ? sides[0].start(set) - sides[0].first() : points[0] + sides[1].start(set - clouds) - sides[1].first();
    }
    DEVICE int other(int set) const { return set < clouds ? set + clouds : set - clouds; }
    DEVICE const Side& side(int set) const { return sides[set >= clouds]; }
    DEVICE i64 token(int set, int point) const { return (set < clouds ? sides[0].start(set) : sides[1].start(set - clouds)) + point; }
    // Where results of a point go: one a point, those of a side together.
    template <typename T> DEVICE T* result(T* const (&of_sides)[2], int set, int point) const {
        return set < clouds ? of_sides[0] + start(set) + point : of_sides[1] + (start(set) - points[0]) + point;
    }
    // Tiles of `size` points that never cross a set are numbered start / size + set: no table, and gaps of at most one a set.
    DEVICE i64 first_tile(int set, int size) const { return start(set) / size + set; }
    DEVICE int set_of_tile(i64 tile, int size) const {
        int low = 0, high = 2 * clouds - 1;
        while (low < high) {
            const int middle = (low + high + 1) >> 1;
            if (first_tile(middle, size) <= tile) low = middle;
            else high = middle - 1;
        }
        return low;
    }
};
template <int DTYPE_ID> DEVICE float coordinate(const void* points, i64 at) {
    if constexpr (DTYPE_ID == 2) return static_cast<const float*>(points)[at];
    const u16 bits = static_cast<const u16*>(points)[at];
    if constexpr (DTYPE_ID == 0) return __uint_as_float((u32)bits << 16);
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
}
// Nearest first: a NaN before every number, equal distances by the lower index.
DEVICE bool nearer(float distance, int index, float best, int best_index) {
    const bool nan = distance != distance, best_nan = best != best;
    if (nan != best_nan) return nan;
    if (!nan && distance != best) return distance < best;
    return index < best_index;
}
DEVICE float min_nan(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// ---------------------------------------------------------------- boxes (up to three coordinates)
constexpr int TILE = 32, SUPER = 1024;  // points of a box, and of a box of boxes

struct Box { float4 low, high; };

// In the operations of `squared_distance`, each of which is monotone after rounding: never above that of any two points of the boxes.
DEVICE float gap(float low, float high, float other_low, float other_high) { return fmaxf(fmaxf(low - other_high, other_low - high), 0.0f); }
DEVICE float squared(float x, float y, float z) { return fmaf(z, z, fmaf(y, y, __fmul_rn(x, x))); }
DEVICE float squared_gap(const Box& a, const Box& b) {
    return squared(gap(a.low.x, a.high.x, b.low.x, b.high.x), gap(a.low.y, a.high.y, b.low.y, b.high.y), gap(a.low.z, a.high.z, b.low.z, b.high.z));
}
DEVICE float squared_distance(const float4& p, const float4& q) { return squared(p.x - q.x, p.y - q.y, p.z - q.z); }
