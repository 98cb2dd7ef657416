// Runs dispatch.cu on the CPU: a thread for each of a block's, warp primitives by exchange, blocks one after another.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using std::min;

struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static unsigned long long shared_words[30000], exchanged[32 * WARPS];
static std::unique_ptr<std::barrier<>> block_meets, warp_meets[WARPS];

#define EMULATED
#define __global__
#define __device__ static
#define __launch_bounds__(x)

static void __syncthreads() { block_meets->arrive_and_wait(); }
static void __syncwarp() { warp_meets[threadIdx.x / 32]->arrive_and_wait(); }
static void __threadfence() {}
static void wait_for_inputs() {}
static void let_next_start() {}

// Every lane's value, seen by a function of all of them.
template <class T, class F> static auto among(T value, F see) {
    std::memcpy(&exchanged[threadIdx.x], &value, sizeof value);
    __syncwarp();
    T all[32];
    for (int i = 0; i < 32; ++i) std::memcpy(&all[i], &exchanged[threadIdx.x / 32 * 32 + i], sizeof value);
    __syncwarp();
    return see(all);
}
static int own_lane() { return threadIdx.x % 32; }
template <class T> static T __shfl_sync(unsigned, T value, int lane) {
    return among(value, [=](T* all) { return all[lane % 32]; });
}
template <class T> static T __shfl_up_sync(unsigned mask, T value, int step) {
    return __shfl_sync(mask, value, own_lane() < step ? own_lane() : own_lane() - step);
}
template <class T> static T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return __shfl_sync(mask, value, own_lane() ^ bits);
}
static unsigned __match_any_sync(unsigned, int value) {
    return among(value, [=](int* all) {
        unsigned found = 0;
        for (int i = 0; i < 32; ++i) found |= unsigned(all[i] == value) << i;
        return found;
    });
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
    return among(value, [](unsigned* all) { return *std::max_element(all, all + 32); });
}
static unsigned __reduce_min_sync(unsigned, unsigned value) {
    return among(value, [](unsigned* all) { return *std::min_element(all, all + 32); });
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(unsigned x) { return __builtin_ffs(x); }
static int __ldcg(const int* p) { return *p; }
static unsigned atomicInc(unsigned* p, unsigned most) {
    unsigned old = *p;
    *p = old >= most ? 0 : old + 1;
    return old;
}
static unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
#define __expf(x) std::exp(x)  // glibc has one of that name
static unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

#include SOURCE

template <class F> static void launch(int blocks, F kernel) {
    gridDim.x = blocks;
    for (int block = 0; block < blocks; ++block) {
        block_meets = std::make_unique<std::barrier<>>(THREADS);
        for (auto& meets : warp_meets) meets = std::make_unique<std::barrier<>>(32);
        std::memset(shared_words, 0xCD, sizeof shared_words);
        std::vector<std::thread> threads;
        for (int i = 0; i < THREADS; ++i)
            threads.emplace_back([=] {
                threadIdx.x = i, blockIdx.x = block;
                kernel();
                block_meets->arrive_and_drop(), warp_meets[i / 32]->arrive_and_drop();
            });
        for (auto& thread : threads) thread.join();
    }
}

extern "C" void run_plan(const int* ids, int pairs, int start, int experts, int block, int* rows, int* block_expert,
                         int* block_first, int* block_count, int* num_blocks) {
    launch(1, [=] {
        plan(ids, pairs, start, experts, block, rows, block_expert, block_first, block_count, num_blocks);
    });
}

#ifdef TOP_K
extern "C" void run_route_plan(const float* logits, const float* bias, const long long* pads, const long long* counter,
                               int layer, float scale, int tokens, float* weights, int* ids, int start, int experts,
                               int block, int* rows, int* block_expert, int* block_first, int* block_count,
                               int* num_blocks) {
    launch((tokens + WARPS - 1) / WARPS, [=] {
        route_plan(logits, bias, pads, counter, layer, scale, tokens, weights, ids, start, experts, block, rows,
                   block_expert, block_first, block_count, num_blocks);
    });
}
#endif
