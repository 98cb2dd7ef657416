// Runs few_tokens.cu on the CPU: a thread for each of a cluster's, tensor-core instructions done by a warp's threads
// together, element by element as the PTX manual lays their fragments out.
#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static thread_local unsigned my_rank;

struct Warp {
    std::barrier<> meet{32};
    uint32_t a[32][4], b[32][2];
};
static thread_local Warp* warp_here;
static thread_local std::barrier<>*cta_here, *cluster_here;

#define EMULATED
#define DEVICE static
#define __global__
#define __launch_bounds__(x)
#define __cluster_dims__(x, y, z)
#define __restrict__
#define __syncthreads() cta_here->arrive_and_wait()
#define __syncwarp() warp_here->meet.arrive_and_wait()

static float from_bf16(unsigned short bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}
static unsigned short to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static void wait_for_inputs() {}
static void let_next_start() {}
static unsigned cluster_rank() { return my_rank; }
static void cluster_sync() { cluster_here->arrive_and_wait(); }
static float half_of(uint32_t word, int which) { return from_bf16(which ? word >> 16 : word & 0xFFFF); }

static void mma(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const int lane = threadIdx.x & 31;
    uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    std::memcpy(warp_here->a[lane], a, sizeof a);
    std::memcpy(warp_here->b[lane], b, sizeof b);
    warp_here->meet.arrive_and_wait();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i >> 1), column = lane % 4 * 2 + (i & 1);
        for (int k = 0; k < 16; k++) {
            const int from_a = row % 8 * 4 + k % 8 / 2, from_b = column * 4 + k % 8 / 2;
            c[i] += half_of(warp_here->a[from_a][(row >= 8) + 2 * (k >= 8)], k & 1) *
                    half_of(warp_here->b[from_b][k >= 8], k & 1);
        }
    }
    warp_here->meet.arrive_and_wait();
}
template <class Quad> static Quad fetch(const void* p, bool wanted) {
    Quad r = {0, 0, 0, 0};
    if (uintptr_t(p) % 16 && wanted) __builtin_trap();
    if (wanted) std::memcpy(&r, p, 16);
    return r;
}
#define load_once fetch<Quad>
#define load fetch<Quad>

// A CTA of the cluster is a copy of the kernel, with its shared memory in a section of its own.
extern "C" char __start_shared0[], __start_shared1[];
static float load_from_rank(const float* mine, unsigned rank) {
    const ptrdiff_t at = (const char*)mine - (my_rank ? __start_shared1 : __start_shared0);
    return *(const float*)((rank ? __start_shared1 : __start_shared0) + at);
}
#define __shared__ static __attribute__((section("shared0"), used))
#define few_tokens few_tokens0
namespace rank0 {
#include SOURCE
}
#undef __shared__
#undef few_tokens
#define __shared__ static __attribute__((section("shared1"), used))
#define few_tokens few_tokens1
namespace rank1 {
#include SOURCE
}

extern "C" void run(const uint16_t* x, const uint16_t* weight, const uint16_t* bias, void* y, int tokens, int rows,
                    int units, int x_stride, int weight_stride) {
    const int threads = 32 * KS * WR, clusters = (rows + 16 * RB * WR - 1) / (16 * RB * WR);
    for (int cluster = 0; cluster < clusters; cluster++) {
        std::barrier<> together(threads * CK);
        std::unique_ptr<std::barrier<>> cta[CK];
        std::vector<Warp> warps(KS * WR * CK);
        std::vector<std::thread> all;
        for (auto& barrier : cta) barrier = std::make_unique<std::barrier<>>(threads);
        for (int rank = 0; rank < CK; rank++)
            for (int i = 0; i < threads; i++)
                all.emplace_back([=, &together, &cta, &warps] {
                    threadIdx.x = i, blockIdx.x = cluster * CK + rank, my_rank = rank;
                    warp_here = &warps[rank * KS * WR + i / 32];
                    cta_here = cta[rank].get(), cluster_here = &together;
                    (rank ? rank1::few_tokens1 : rank0::few_tokens0)(
                        x, weight, bias, y, tokens, rows, units, x_stride, weight_stride);
                });
        for (auto& thread : all) thread.join();
    }
}
