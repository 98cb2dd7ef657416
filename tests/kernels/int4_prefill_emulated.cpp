// Runs int4_prefill.cu on a CPU: threads are fibers, and what is asynchronous happens as late as it may.
// A copy's target is spoilt when the copy is issued and filled when its thread waits for it; a product reads its
// operands when its warp waits for it. So a stage freed or a register reused too early shows in the result.
// Compiled by test_int4_prefill.py with -DSOURCE="...".
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#define EMULATED
#define __global__
#define __launch_bounds__(...)
#define D static inline

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static struct { int x; } blockIdx, gridDim;

struct Copy { unsigned to; const void* from; int bytes; };
struct Product { float* c; const unsigned* a; unsigned long long tokens; int n; };
struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<Copy> issued;
    std::deque<std::vector<Copy>> copies;
    std::deque<Product> products;
    unsigned given = 0;  // to the other lanes of the warp
    bool done = false;
};
struct Meeting { int count = 0, turn = 0; };
struct Barrier { unsigned expected = 0, missing = 0, phase = 0; };
struct Range { const char* begin; size_t bytes; };

static std::vector<Thread> threads;
static std::map<int, Meeting> meetings;  // warps from 100 on, named barriers, 0: all
static std::map<unsigned, Barrier> barriers;
static ucontext_t scheduler;
static int current;
static long progress, bad;
static Range ranges[4];  // x, weights, scales, y
static char shared[240 << 10];

static void yield() { swapcontext(&threads[current].context, &scheduler); }
static void meet(int which, int count) {
    Meeting& meeting = meetings[which];
    const int turn = meeting.turn;
    if (++meeting.count == count) meeting.count = 0, meeting.turn++, progress++;
    else while (meeting.turn == turn) yield();
}
static void meet_warp() { meet(100 + current / 32, 32); }
static const Thread& lane_of_warp(int lane) { return threads[current / 32 * 32 + lane]; }
static void check(const void* p, size_t bytes) {
    for (const Range& range : ranges)
        if ((const char*)p >= range.begin && (const char*)p + bytes <= range.begin + range.bytes && (uintptr_t)p % bytes == 0)
            return;
    bad++;
}
static char* at_shared(unsigned at, unsigned bytes) {
    if (at % bytes || at + bytes > sizeof shared) { bad++; return shared; }
    return shared + at;
}

static float as_float(unsigned bits) { float v; memcpy(&v, &bits, 4); return v; }
static unsigned bf16(float v) {
    unsigned bits;
    memcpy(&bits, &v, 4);
    return std::isnan(v) ? 0x7FFF : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
static float half_of(unsigned pair, int which) { return as_float(which ? pair & 0xFFFF0000u : pair << 16); }

static void __syncthreads() { meet(0, (int)threads.size()); }
template <int N>
static void sync_some(int which) { meet(which, N); }
static unsigned shared_memory() { return 16; }  // not on the boundary that stages need
static void copy(unsigned to, const void* from, int bytes) {
    if (bytes == 16) check(from, bytes);
    memset(at_shared(to, bytes), 0xFF, bytes);
    threads[current].issued.push_back({to, from, bytes});
}
static void copy16(unsigned to, const void* from) { copy(to, from, 16); }
static void copy4(unsigned to, const void* from) { copy(to, from, 4); }
static void commit_copies() {
    threads[current].copies.push_back(threads[current].issued);
    threads[current].issued.clear();
}
template <int N>
static void wait_copies() {
    auto& copies = threads[current].copies;
    for (; copies.size() > N; copies.pop_front())
        for (const Copy& c : copies.front()) memcpy(at_shared(c.to, c.bytes), c.from, c.bytes);
}
template <typename T>
static T load(unsigned at) { T v; memcpy(&v, at_shared(at, sizeof v), sizeof v); return v; }
static unsigned lds(unsigned at) { return load<unsigned>(at); }
static uint2 lds2(unsigned at) { return load<uint2>(at); }
static uint4 lds4(unsigned at) { return load<uint4>(at); }
static void sts(unsigned at, unsigned v) { memcpy(at_shared(at, 4), &v, 4); }
static void store16(unsigned short* to, uint4 v) { check(to, 16); memcpy(to, &v, 16); }
static int thread_id() { return current; }
static int load_count(const int* p) { return *p; }
static unsigned prmt(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return r;
}
static unsigned and_or(unsigned a, unsigned b, unsigned c) { return (a & b) | c; }
static unsigned pack(float low, float high) { return bf16(low) | bf16(high) << 16; }
static unsigned fma2(unsigned a, unsigned b, unsigned c) {
    float r[2];
    for (int i = 0; i < 2; i++) r[i] = half_of(a, i) * half_of(b, i) + half_of(c, i);
    return pack(r[0], r[1]);
}
static unsigned turned(unsigned a) {
    const int g = current % 32 / 4, t = current % 4;
    threads[current].given = a;
    meet_warp();
    unsigned r = 0;
    for (int i = 0; i < 2; i++) {
        const unsigned pair = lane_of_warp((2 * t + i) * 4 + g / 2).given;
        r |= (g % 2 ? pair >> 16 : pair & 0xFFFF) << 16 * i;
    }
    meet_warp();
    return r;
}
static float exp_of(float a) { return expf(a); }
static float inverse(float a) { return 1 / a; }

static void barrier_start(unsigned at, unsigned n) { barriers[at] = {n, n, 0}; }
static void barriers_started() {}
static void arrive(unsigned at) {
    Barrier& b = barriers[at];
    if (!b.expected) bad++;
    if (--b.missing == 0) b.missing = b.expected, b.phase++, progress++;
}
static void await(unsigned at, unsigned parity) {
    if (!barriers[at].expected) bad++;
    while ((barriers[at].phase & 1) == parity) yield();
}
static void fence_copies() {}
static void few_registers() {}
static void many_registers() {}

// Element (row, k) of a 16 x 16 A fragment: lane, register and half.
static float element(const unsigned* a, int row, int k) { return half_of(a[k / 8 * 2 + row / 8], k % 2); }
static float token_value(unsigned long long tokens, int n, int k) {
    if (tokens >> 62 != 1) bad++;
    unsigned at = (tokens & 0x3FFF) << 4;
    at += n / 8 * (unsigned)((tokens >> 32 & 0x3FFF) << 4) + n % 8 * 128 + k * 2;
    return half_of(load<unsigned short>(at ^ (at >> 7 & 7) << 4), 0);
}
template <int N>
static void product(float (&c)[N / 2], const unsigned (&a)[4], unsigned long long tokens) {
    threads[current].products.push_back({c, a, tokens, N});
}
template <int PENDING>
static void wait_products() {
    const int g = current % 32 / 4, t = current % 4;
    auto& products = threads[current].products;
    while (products.size() > PENDING) {
        meet_warp();
        const Product& p = products.front();
        for (int row = g; row < 16; row += 8)
            for (int k = 0; k < 16; k++) {
                const float a = element(lane_of_warp(row % 8 * 4 + k % 8 / 2).products.front().a, row, k);
                for (int n = 0; n < p.n / 8; n++)
                    for (int i = 0; i < 2; i++)
                        p.c[n * 4 + row / 8 * 2 + i] += a * token_value(p.tokens, n * 8 + 2 * t + i, k);
            }
        meet_warp();
        products.pop_front();
        meet_warp();
    }
}
static void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int g = current % 32 / 4, t = current % 4;
    const unsigned b[2] = {b0, b1};
    static std::map<int, std::vector<const unsigned*>> all_a, all_b;
    auto &as = all_a[current / 32], &bs = all_b[current / 32];
    as.resize(32), bs.resize(32);
    as[current % 32] = a, bs[current % 32] = b;
    meet_warp();
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) {
            const int row = g + i / 2 * 8, column = 2 * t + i % 2, owner = k % 8 / 2;
            c[i] += element(as[row % 8 * 4 + owner], row, k) * half_of(bs[column * 4 + owner][k / 8], k % 2);
        }
    meet_warp();
}

#include SOURCE

static struct {
    const u16* x; const char *weights, *scales; u16* y;
    const int *rows, *expert, *first, *count, *blocks;
    int choices, limit, k64, tiles;
} call;

static void enter() {
    int4_prefill(call.x, call.weights, call.scales, call.y, call.rows, call.expert, call.first, call.count, call.blocks,
                 call.choices, call.limit, call.k64, call.tiles);
    threads[current].done = true;
    progress++;
    yield();
}

// True unless threads wait for each other for ever.
static bool run_block() {
    memset(shared, 0xFF, sizeof shared);
    meetings.clear(), barriers.clear();
    threads = std::vector<Thread>(HOPPER ? 384 : 256);
    for (Thread& thread : threads) {
        thread.stack.resize(128 << 10);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.context, enter, 0);
    }
    for (bool left = true; left;) {
        const long before = progress;
        left = false;
        for (current = 0; current < (int)threads.size(); current++) {
            if (threads[current].done) continue;
            left = true;
            swapcontext(&scheduler, &threads[current].context);
        }
        if (left && progress == before) return false;
    }
    return true;
}

extern "C" long emulate(
    int grid, const void* x, size_t x_bytes, const void* weights, size_t weights_bytes, const void* scales,
    size_t scales_bytes, void* y, size_t y_bytes, const int* rows, const int* expert, const int* first, const int* count,
    const int* blocks, int choices, int limit, int k64, int tiles) {
    ranges[0] = {(const char*)x, x_bytes}, ranges[1] = {(const char*)weights, weights_bytes};
    ranges[2] = {(const char*)scales, scales_bytes}, ranges[3] = {(const char*)y, y_bytes};
    call = {(const u16*)x, (const char*)weights, (const char*)scales, (u16*)y, rows, expert, first, count, blocks,
            choices, limit, k64, tiles};
    bad = progress = 0;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        if (!run_block()) return -1;
    return bad;
}
