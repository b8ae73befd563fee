// The kernel of all layers on a CPU. A thread of the GPU is a coroutine, and all CTAs run together, because they exchange
// words. A thread runs until it waits: for a word, a barrier, a tile, or the other lanes of its warp. Threads take turns
// in ascending or descending order (`set_descending`), so that a missing barrier changes results.

#include <stdint.h>
#include <stdio.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
using std::max;
using std::min;

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };

inline float __uint_as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
inline uint32_t __float_as_uint(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __expf(float x) { return expf(x); }

// ---- threads

struct Barrier { int arrived = 0, turn = 0; };
struct Counter { int arrivals, left, phase = 0; int64_t bytes = 0; };  // an mbarrier
struct Fragments { uint32_t a[4], b[2]; };
struct Cta {
    std::vector<char> memory;
    std::vector<Barrier> warps;
    Barrier all, named;
    std::map<uint64_t*, Counter> counters;
    std::vector<float> lanes;
    std::vector<Fragments> fragments;
};
struct Thread {
    ucontext_t at;
    std::vector<char> stack;
    int index, cta;
    bool done = false;
};

static std::vector<Thread> threads;
static std::vector<Cta> ctas;
static Thread* now;
static ucontext_t scheduler;
static int64_t moves;  // what happened: if nothing does, all threads wait forever
static bool descending;

struct Index { int x; };
#define threadIdx (Index{now->index})
#define blockIdx (Index{now->cta})

static Cta& own() { return ctas[now->cta]; }
static void yield() { swapcontext(&now->at, &scheduler); }
static void wait_at(Barrier& barrier, int members) {
    int turn = barrier.turn;
    if (++barrier.arrived == members) barrier.arrived = 0, barrier.turn++;
    while (barrier.turn == turn) yield();
    moves++;
}
inline void __syncwarp() { wait_at(own().warps[now->index / 32], 32); }
inline void __syncthreads() { wait_at(own().all, int(own().lanes.size())); }
inline void meet(int count) { wait_at(own().named, count); }
inline void let_the_next_kernel_begin() {}
template <int COUNT> void take_registers() {}
template <int COUNT> void leave_registers() {}
inline char* shared_memory() {
    auto& memory = own().memory;
    return memory.data() + 128 - reinterpret_cast<uintptr_t>(memory.data()) % 128;
}

// ---- numbers

inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
inline uint32_t bits(float x) {
    uint32_t all = __float_as_uint(x);
    return (all + 0x7fff + ((all >> 16) & 1)) >> 16;
}
inline float rounded(float x) { return low(bits(x)); }
inline float power_of_2(float x) { return exp2f(x); }
inline float from_lane_xor(float x, int mask) {
    own().lanes[now->index] = x;
    __syncwarp();
    float y = own().lanes[now->index ^ mask];
    __syncwarp();
    return y;
}
inline void multiply_add(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    auto& all = own().fragments;
    all[now->index] = {{a0, a1, a2, a3}, {b0, b1}};
    __syncwarp();
    int warp = now->index / 32 * 32, group = now->index % 32 / 4, t = now->index % 4;
    for (int row = 0; row < 2; row++)
        for (int column = 0; column < 2; column++)
            for (int lane = 0; lane < 4; lane++)
                for (int half = 0; half < 2; half++) {
                    uint32_t a = all[warp + 4 * group + lane].a[row + 2 * half];
                    uint32_t b = all[warp + 4 * (2 * t + column) + lane].b[half];
                    sum[2 * row + column] += low(a) * low(b) + high(a) * high(b);
                }
    __syncwarp();
}

// ---- words and tiles

inline uint4 look(const uint4* at) { return *at; }
inline uint64_t look(const uint64_t* at) { return *at; }
inline void tell(uint32_t* at, uint32_t x) { *at = x, moves++; }
inline void tell(uint64_t* at, uint64_t x) { *at = x, moves++; }
inline void look_again() { yield(); }

inline void make_barrier(uint64_t* barrier, int arrivals) { own().counters[barrier] = {arrivals, arrivals}; }
inline void barriers_made() {}
static void turn_if_full(Counter& counter) {
    if (counter.left || counter.bytes) return;
    counter.left = counter.arrivals, counter.phase ^= 1, moves++;
}
inline void arrive(uint64_t* barrier) {
    Counter& counter = own().counters.at(barrier);
    if (!counter.left) puts("one arrival too many"), abort();
    counter.left--;
    turn_if_full(counter);
}
inline void expect(uint64_t* barrier, uint32_t bytes) {
    own().counters.at(barrier).bytes += bytes;
    arrive(barrier);
}
inline void wait(uint64_t* barrier, uint32_t phase) {
    while (own().counters.at(barrier).phase == int(phase)) yield();
    moves++;
}
inline void copy_in(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    if ((bytes | reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16) puts("not 16 bytes"), abort();
    memcpy(to, from, bytes);
    Counter& counter = own().counters.at(barrier);
    counter.bytes -= bytes, moves++;
    turn_if_full(counter);
}

#include "layers.cuh"

static const Arguments* given;
static void enter() {
    layers_kernel(*given);
    now->done = true, moves++;
    yield();
}

extern "C" void set_descending(bool value) { descending = value; }
extern "C" int arguments_bytes() { return sizeof(Arguments); }
extern "C" int launch(const Arguments* arguments, void*) {
    given = arguments;
    const int count = ALL_THREADS;
    ctas.assign(CTAS, {});
    for (Cta& cta : ctas) {
        cta.memory.assign(sizeof(Shared) + 256, char(0xff));  // NaN
        cta.warps.resize(count / 32), cta.lanes.resize(count), cta.fragments.resize(count);
    }
    threads = std::vector<Thread>(CTAS * count);
    for (int i = 0; i < CTAS * count; i++) {
        Thread& thread = threads[i];
        thread.index = i % count, thread.cta = i / count, thread.stack.resize(1 << 15);
        getcontext(&thread.at);
        thread.at.uc_stack.ss_sp = thread.stack.data(), thread.at.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.at, enter, 0);
    }
    for (size_t left = threads.size(); left;) {
        int64_t before = moves;
        for (size_t i = 0; i < threads.size(); i++) {
            now = &threads[descending ? threads.size() - 1 - i : i];
            if (now->done) continue;
            swapcontext(&scheduler, &now->at);
            left -= now->done;
        }
        if (moves == before) return 1;
    }
    return 0;
}
