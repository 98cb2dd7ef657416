// Sorts (token, choice) pairs by expert in one block; in `route_plan` the block that finishes routing last does it.
//
// Macros: WARPS a block, WIDE (1: 32-bit counters, for 65536 pairs and more). `route_plan` also: EXPERTS, TOP_K,
// SOFTMAX, NORMALISE. Nothing depends on the order in which threads arrive: the sort is stable.

#define FULL 0xFFFFFFFFu
#define THREADS (WARPS * 32)
#if WIDE
typedef unsigned int counter_t;
#else
typedef unsigned short counter_t;
#endif

struct Plan {
    int *rows, *block_expert, *block_first, *block_count, *num_blocks;
};

// Shared memory: counts of each warp and expert, then each expert's first row, then the scan's warp totals.
#ifndef EMULATED
extern __shared__ unsigned long long shared_words[];

// Programmatic dependent launch (sm_90 and later): the kernel after this one may start as soon as there is room for it,
// and this one goes on when the kernel before it has ended and what that wrote is there. Every block comes here.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
#endif

__device__ inline unsigned long long scan_warp(unsigned long long value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        unsigned long long other = __shfl_up_sync(FULL, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Exclusive sum over the block's threads.
__device__ inline unsigned long long scan_block(unsigned long long value, unsigned long long* totals) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned long long inclusive = scan_warp(value, lane);
    if (lane == 31) totals[warp] = inclusive;
    __syncthreads();
    unsigned long long total = lane < WARPS ? totals[lane] : 0;
    unsigned long long before = scan_warp(total, lane) - total;
    return __shfl_sync(FULL, before, warp) + inclusive - value;
}

// One expert's rows start at `first`; its blocks at `block_id`.
__device__ inline void write_blocks(Plan plan, int expert, int first, int count, int block, int block_id) {
    for (int done = 0; done < count; done += block, ++block_id) {
        plan.block_expert[block_id] = expert;
        plan.block_first[block_id] = first + done;
        plan.block_count[block_id] = min(block, count - done);
    }
}

__device__ inline int local_expert(const int* ids, int pair, int end, int start, int experts) {
    // Past L1: in `route_plan` other blocks have just written them.
    int expert = pair < end ? __ldcg(ids + pair) - start : -1;
    return (unsigned)expert < (unsigned)experts ? expert : -1;
}

__device__ inline void plan_pairs(const int* ids, int pairs, int start, int experts, int block, Plan plan) {
    unsigned long long* totals = shared_words;
    int* first_row = (int*)(totals + 32);
    counter_t* counts = (counter_t*)(first_row + experts);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Each warp owns a run of pairs, in order; few pairs keep most warps out of it.
    const int run = ((pairs + WARPS - 1) / WARPS + 31) / 32 * 32;
    const int warps = (pairs + run - 1) / run;
    const int begin = min(pairs, warp * run), end = min(pairs, begin + run);
    counter_t* mine = counts + warp * experts;
    for (int i = threadIdx.x; i < warps * experts; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (int base = begin; base < end; base += 32) {
        int expert = local_expert(ids, base + lane, end, start, experts);
        unsigned same = __match_any_sync(FULL, expert);
        if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    // Each thread owns a run of experts: what of them lies in earlier warps, their totals, then the sum over threads.
    const int share = (experts + THREADS - 1) / THREADS;
    const int from = min(experts, (int)threadIdx.x * share), to = min(experts, from + share);
    unsigned long long sum = 0;  // rows above, blocks below
    for (int x = from; x < to; ++x) {
        unsigned count = 0;
#pragma unroll 8
        for (int w = 0; w < warps; ++w) {
            unsigned here = counts[w * experts + x];
            counts[w * experts + x] = count;
            count += here;
        }
        first_row[x] = count;
        sum += ((unsigned long long)count << 32) + (count + block - 1) / block;
    }
    unsigned long long before = scan_block(sum, totals);
    for (int x = from; x < to; ++x) {
        int count = first_row[x], first = (int)(before >> 32), block_id = (int)(before & FULL);
        first_row[x] = first;
        write_blocks(plan, x, first, count, block, block_id);
        before += ((unsigned long long)count << 32) + (count + block - 1) / block;
    }
    if (threadIdx.x == THREADS - 1) *plan.num_blocks = (int)(before & FULL);
    __syncthreads();
    for (int base = begin; base < end; base += 32) {
        int expert = local_expert(ids, base + lane, end, start, experts);
        unsigned same = __match_any_sync(FULL, expert);
        unsigned earlier = __popc(same & ((1u << lane) - 1));
        if (expert >= 0) plan.rows[first_row[expert] + mine[expert] + earlier] = base + lane;
        __syncwarp();
        if (expert >= 0 && earlier == 0) mine[expert] += __popc(same);
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) plan(const int* ids, int pairs, int start, int experts, int block,
                                                           int* rows, int* block_expert, int* block_first,
                                                           int* block_count, int* num_blocks) {
    wait_for_inputs();
    plan_pairs(ids, pairs, start, experts, block, Plan{rows, block_expert, block_first, block_count, num_blocks});
    // Not before: the products that come next fill every multiprocessor and can do nothing without this plan, while the
    // shared experts, on a stream beside this one, could.
    let_next_start();
}

#ifdef TOP_K
// A lane holds four neighbouring experts of every 128.
#define PER_LANE ((EXPERTS + 127) / 128 * 4)

__device__ unsigned finished;  // blocks that have routed; wraps to zero, so every launch starts from it

__device__ inline int expert_of(int j, int lane) { return (j / 4 * 32 + lane) * 4 + j % 4; }

__device__ inline unsigned ordered(float value) {
    unsigned bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Philox4x32-10 as Triton's `tl.philox` computes it.
__device__ inline void philox(unsigned long long seed, unsigned c[4]) {
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        unsigned c0 = c[0], c2 = c[2];
        c[0] = __umulhi(0xCD9E8D57u, c2) ^ c[1] ^ k0;
        c[2] = __umulhi(0xD2511F53u, c0) ^ c[3] ^ k1;
        c[1] = 0xCD9E8D57u * c2;
        c[3] = 0xD2511F53u * c0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

__device__ inline float sum_warp(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(FULL, value, step);
    return value;
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// The lane's best remaining expert: the lowest id of the largest key.
__device__ inline void best_here(const unsigned keys[PER_LANE], int lane, unsigned& key, int& expert) {
    key = keys[0];
    expert = expert_of(0, lane);
#pragma unroll
    for (int j = 1; j < PER_LANE; ++j)
        if (keys[j] > key) key = keys[j], expert = expert_of(j, lane);
}

// What the lane's experts have in a row, all on its way before the first is used.
__device__ inline void load_lane(const float* row, int lane, float absent, float values[PER_LANE]) {
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j)
        values[j] = row != nullptr && expert_of(j, lane) < EXPERTS ? row[expert_of(j, lane)] : absent;
}

__device__ inline void load_keys(const float* row, const float bias[PER_LANE], const long long* counter, int layer,
                                 int token, int lane, float values[PER_LANE], unsigned keys[PER_LANE]) {
    load_lane(row, lane, -__int_as_float(0x7F800000), values);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        float choice = SOFTMAX ? values[j] : sigmoid(values[j]) + bias[j];
        keys[j] = expert_of(j, lane) < EXPERTS ? ordered(choice) : 0;
    }
    if (counter == nullptr) return;
    unsigned long long seed = (unsigned long long)*counter;
#pragma unroll
    for (int q = 0; q < PER_LANE; q += 4) {
        unsigned c[4] = {(unsigned)expert_of(q, lane) / 4, (unsigned)token, (unsigned)layer, 0u};
        philox(seed, c);
        // The order in which the Triton kernel joins the four words.
        unsigned words[4] = {c[0], c[2], c[1], c[3]};
#pragma unroll
        for (int j = 0; j < 4; ++j) keys[q + j] = expert_of(q + j, lane) < EXPERTS ? words[j] : 0;
    }
}

// One token by one warp.
__device__ inline void route(const float* row, const float bias[PER_LANE], const long long* pads,
                             const long long* counter, int layer, float scale, int token, int lane, float* weights,
                             int* ids) {
    float values[PER_LANE];
    unsigned keys[PER_LANE];
    load_keys(row, bias, counter, layer, token, lane, values, keys);
    int chosen = 0;
    unsigned key;
    int expert;
    best_here(keys, lane, key, expert);
#pragma unroll
    for (int i = 0; i < TOP_K; ++i) {
        unsigned best = __reduce_max_sync(FULL, key);
        int winner = (int)__reduce_min_sync(FULL, key == best ? (unsigned)expert : FULL);
        if (lane == i) chosen = winner;
        if (expert == winner) {
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j)
                if (expert_of(j, lane) == winner) keys[j] = 0;
            best_here(keys, lane, key, expert);
        }
    }
    float weight;
    if (SOFTMAX) {
        float peak = values[0], total = 0.0f;
#pragma unroll
        for (int j = 1; j < PER_LANE; ++j) peak = fmaxf(peak, values[j]);
#pragma unroll
        for (int step = 16; step; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(FULL, peak, step));
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) total += __expf(values[j] - peak);
        weight = __expf(row[chosen] - peak) / sum_warp(total);
    } else {
        weight = sigmoid(row[chosen]);
    }
    if (lane >= TOP_K) weight = 0.0f;
    if (NORMALISE) weight /= sum_warp(weight) + 1e-20f;
    const bool pad = pads != nullptr && pads[token] < 0;
    if (lane < TOP_K) {
        weights[token * TOP_K + lane] = pad ? 0.0f : weight * scale;
        ids[token * TOP_K + lane] = pad ? -1 : chosen;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    route_plan(const float* logits, const float* bias, const long long* pads, const long long* counter, int layer,
               float scale, int tokens, float* weights, int* ids, int start, int experts, int block, int* rows,
               int* block_expert, int* block_first, int* block_count, int* num_blocks) {
    const int token = blockIdx.x * WARPS + threadIdx.x / 32;
    float lane_bias[PER_LANE];  // a weight, so that it may be fetched before the wait
    load_lane(SOFTMAX ? nullptr : bias, threadIdx.x % 32, 0.0f, lane_bias);
    wait_for_inputs();
    if (token < tokens)
        route(logits + (long long)token * EXPERTS, lane_bias, pads, counter, layer, scale, token, threadIdx.x % 32,
              weights, ids);
    __threadfence();
    __syncthreads();
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) shared_words[0] = atomicInc(&finished, gridDim.x - 1);
        __syncthreads();
        const bool last = shared_words[0] == gridDim.x - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
    }
    plan_pairs(ids, tokens * TOP_K, start, experts, block,
               Plan{rows, block_expert, block_first, block_count, num_blocks});
    let_next_start();
}
#endif
