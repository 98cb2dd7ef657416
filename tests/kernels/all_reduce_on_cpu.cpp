// Runs all_reduce.cu on the CPU: ranks side by side, each launching one kernel after another, a thread for each of a
// launch's. A pair of words is two stores and two loads, as the GPU's memory model has it, in either order.
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static thread_local std::barrier<>* block_meets;
static thread_local std::minstd_rand chance;

#define EMULATED
#define DEVICE static
#define __global__
#define __launch_bounds__(x)
#define __syncthreads() block_meets->arrive_and_wait()

static void sometimes_wait() {
    if (chance() % 8 == 0)
        for (int i = 0; i < 20; ++i) std::this_thread::yield();
}
static void send_two(unsigned long long* p, unsigned long long first, unsigned long long second) {
    using Word = std::atomic_ref<unsigned long long>;
    const bool swapped = chance() % 2;
    sometimes_wait();
    Word(p[swapped]).store(swapped ? second : first, std::memory_order_relaxed);
    sometimes_wait();
    Word(p[!swapped]).store(swapped ? first : second, std::memory_order_relaxed);
}
static void look_at_two(const unsigned long long* p, unsigned long long& first, unsigned long long& second) {
    using Word = std::atomic_ref<unsigned long long>;
    auto* words = const_cast<unsigned long long*>(p);
    const bool swapped = chance() % 2;
    (swapped ? second : first) = Word(words[swapped]).load(std::memory_order_relaxed);
    sometimes_wait();
    (swapped ? first : second) = Word(words[!swapped]).load(std::memory_order_relaxed);
    sometimes_wait();
}
static float as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static unsigned as_bits(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static float from_bf16(unsigned bits) { return as_float(bits << 16); }
static unsigned short to_bf16(float value) {
    const unsigned bits = as_bits(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static void wait_for_inputs() {}

#include SOURCE

// data: [RANKS, launches, most_vectors * 16 bytes]; epochs: [RANKS, blocks]; buffers: [RANKS, words].
extern "C" void run(char* data, const int* vectors, int launches, int most_vectors, unsigned* epochs, int blocks,
                    unsigned long long* buffers, long long words, unsigned seed) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < RANKS; ++rank)
        ranks.emplace_back([=] {
            unsigned long long* of[8] = {};
            for (int r = 0; r < RANKS; ++r) of[r] = buffers + r * words;
            for (int launch = 0; launch < launches; ++launch) {
                auto* x = (Quad*)(data + ((long long)rank * launches + launch) * most_vectors * 16);
                std::vector<std::unique_ptr<std::barrier<>>> meets;
                std::vector<std::thread> threads;
                for (int block = 0; block * THREADS < vectors[launch]; ++block) {
                    meets.push_back(std::make_unique<std::barrier<>>(THREADS));
                    for (int i = 0; i < THREADS; ++i)
                        threads.emplace_back([=, meet = meets.back().get()] {
                            threadIdx.x = i, blockIdx.x = block, block_meets = meet;
                            chance.seed(1 + seed + ((rank * launches + launch) * blocks + block) * THREADS + i);
                            all_reduce(x, vectors[launch], rank, blocks, epochs + rank * blocks, of[rank], of[0], of[1],
                                       of[2], of[3], of[4], of[5], of[6], of[7]);
                        });
                }
                for (auto& thread : threads) thread.join();
            }
        });
    for (auto& rank : ranks) rank.join();
}
