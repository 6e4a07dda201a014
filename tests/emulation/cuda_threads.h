// Enough of CUDA to run a kernel on the host: a POSIX thread for each thread of a CTA, barriers between them, CTAs one
// after the other.
//
// Included in place of ptx.cuh. Warp shuffles are for the whole CTA at once, so every thread must come to each of them
// as often.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <pthread.h>
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
using std::max;
using std::min;

#define DEVICE inline
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
constexpr u32 FULL_WARP = 0xffffffffu;
constexpr int HOST_THREADS = 256;

struct uint4 {
    u32 x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static thread_local struct {
    u32 x, y;
} threadIdx, blockIdx;
static pthread_barrier_t all_threads;

inline void __syncthreads() { pthread_barrier_wait(&all_threads); }
template <typename T>
inline T __ldg(const T *from) {
    return *from;
}
inline float __uint_as_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __shfl_xor_sync(u32, float x, int step) {
    static float of_threads[HOST_THREADS];
    __syncthreads();
    of_threads[threadIdx.x] = x;
    __syncthreads();
    return of_threads[threadIdx.x ^ step];
}

template <typename Params>
struct HostThread {
    void (*kernel)(Params);
    const Params *parameters;
    u32 columns, rows, thread;
};
template <typename Params>
void *run_thread(void *given) {
    const auto &job = *static_cast<HostThread<Params> *>(given);
    threadIdx.x = job.thread;
    for (blockIdx.y = 0; blockIdx.y < job.rows; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < job.columns; ++blockIdx.x) {
            job.kernel(*job.parameters);
            __syncthreads();
        }
    return nullptr;
}
template <typename Params>
void run_grid(void (*kernel)(Params), const void *parameters, u32 columns, u32 rows) {
    Params copy;
    memcpy(&copy, parameters, sizeof copy);
    pthread_barrier_init(&all_threads, nullptr, HOST_THREADS);
    pthread_t threads[HOST_THREADS];
    HostThread<Params> jobs[HOST_THREADS];
    for (u32 t = 0; t < HOST_THREADS; ++t) {
        jobs[t] = {kernel, &copy, columns, rows, t};
        pthread_create(threads + t, nullptr, run_thread<Params>, jobs + t);
    }
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
    pthread_barrier_destroy(&all_threads);
}
