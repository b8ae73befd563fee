// FlashAttention-2 forward (Dao 2023, algorithm 1); README.md explains it step by step.
//
// A CTA computes ROWS queries of one head, 16 * FORWARD_BLOCKS by each warp. Q stays in shared memory (FORWARD_Q_KEPT:
// in registers), tiles of FORWARD_KEYS keys and values stream through it, STAGES of each at a time.

#pragma once

struct Forward {
    static constexpr int WARPS = FORWARD_WARPS, BLOCKS = FORWARD_BLOCKS, KEYS = FORWARD_KEYS, STAGES = FORWARD_STAGES;
    static constexpr int THREADS = WARPS * 32, ROWS = WARPS * BLOCKS * 16;
    using Queries = Tile<ROWS, HEAD_DIM>;
    using Keys = Tile<KEYS, HEAD_DIM>;
    static constexpr int BYTES = Queries::BYTES + 2 * STAGES * Keys::BYTES;
};

// A row's reference may lag behind its largest score by so many powers of two before its sums are scaled down. Any
// reference gives the softmax, because it divides out. But with one that lags, the largest P is not 1, which 16 bits
// hold exactly: a row that one key dominates is rounded once more. Hence 0.
constexpr float LAG = FORWARD_LAG;

__global__ void __launch_bounds__(Forward::THREADS, FORWARD_CTAS) forward_kernel(const __grid_constant__ Arguments a) {
    using F = Forward;
    constexpr int BLOCKS = F::BLOCKS, KEYS = F::KEYS, STAGES = F::STAGES;
    const uint32_t q_tile = shared_address(shared);
    const uint32_t k_tiles = q_tile + F::Queries::BYTES, v_tiles = k_tiles + STAGES * F::Keys::BYTES;

    // The longest first: under a causal mask the last queries see most keys.
    const int query_tiles = ceil_div(a.num_queries, F::ROWS);
    const int batch_head = blockIdx.x / query_tiles;
    const int first = (query_tiles - 1 - blockIdx.x % query_tiles) * F::ROWS;
    const int batch = batch_head / a.heads, head = batch_head % a.heads, kv_head = head / (a.heads / a.kv_heads);
    const Head q(a.q, batch, head), k(a.k, batch, kv_head), v(a.v, batch, kv_head), out(a.out, batch, head);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * BLOCKS * 16;

    // Every query of the tile sees all keys of the first `whole` tiles of keys, and no key from tile `end` on.
    const bool skips = a.causal && CAUSAL_SKIP;
    const int whole = (a.causal ? min(first + 1, a.num_keys) : a.num_keys) / KEYS;
    const int end = ceil_div(skips ? min(first + F::ROWS, a.num_keys) : a.num_keys, KEYS);

    auto load_keys = [&](int tile) {
        if (tile < end) {
            int offset = tile % STAGES * F::Keys::BYTES;
            F::Keys::load<F::THREADS>(threadIdx.x, k_tiles + offset, k, tile * KEYS, a.num_keys, a.head_dim);
            F::Keys::load<F::THREADS>(threadIdx.x, v_tiles + offset, v, tile * KEYS, a.num_keys, a.head_dim);
        }
        close_copies();
    };
    F::Queries::load<F::THREADS>(threadIdx.x, q_tile, q, first, a.num_queries, a.head_dim);
    for (int tile = 0; tile < STAGES - 1; tile++) load_keys(tile);

    Sums<BLOCKS, HEAD_DIM> sum;  // of 2^(score - reference) * v
    float total[BLOCKS][2], reference[BLOCKS][2];  // of rows lane / 4 and lane / 4 + 8; total: of this lane's columns
    #pragma unroll
    for (int m = 0; m < BLOCKS; m++)
        for (int half = 0; half < 2; half++) total[m][half] = 0.0f, reference[m][half] = -infinity();

    const Reader<HEAD_DIM, true> q_reader(q_tile + warp_row * HEAD_DIM * 2);
#if FORWARD_Q_KEPT
    uint32_t q_kept[BLOCKS][HEAD_DIM / 16][4];
    if (STAGES == 1) close_copies();
    wait_for_copies<STAGES == 1 ? 0 : STAGES - 2>();
    __syncthreads();
    #pragma unroll
    for (int m = 0; m < BLOCKS; m++)
        #pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; d++) read_matrices(q_kept[m][d], q_reader.at(m, d));
#endif

    for (int tile = 0; tile < end; tile++) {
        if (STAGES == 1) {
            __syncthreads();  // all warps are done with the tile before
            load_keys(tile);
        }
        wait_for_copies<STAGES == 1 ? 0 : STAGES - 2>();
        __syncthreads();  // the copies of all threads are there, and the tile before is free
        if (STAGES > 1) load_keys(tile + STAGES - 1);
        const Reader<HEAD_DIM, false> k_reader(k_tiles + tile % STAGES * F::Keys::BYTES);
        const Reader<HEAD_DIM, true> v_reader(v_tiles + tile % STAGES * F::Keys::BYTES);

        Sums<BLOCKS, KEYS> scores;  // Q K^T
        #pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; d++) {
            uint32_t q_part[BLOCKS][4];
            #pragma unroll
            for (int m = 0; m < BLOCKS; m++)
#if FORWARD_Q_KEPT
                for (int i = 0; i < 4; i++) q_part[m][i] = q_kept[m][d][i];
#else
                read_matrices(q_part[m], q_reader.at(m, d));
#endif
            #pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                uint32_t k_part[4];
                read_matrices(k_part, k_reader.at(n, d));
                #pragma unroll
                for (int m = 0; m < BLOCKS; m++) scores.add(m, n, q_part[m], k_part);
            }
        }

        if (tile >= whole) {  // cut by the diagonal or by the end of the keys
            #pragma unroll
            for (int m = 0; m < BLOCKS; m++)
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    int row = first + warp_row + m * 16 + i / 2 * 8 + lane / 4;
                    int last = a.causal ? min(row, a.num_keys - 1) : a.num_keys - 1;
                    #pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
                        if (tile * KEYS + n * 8 + lane % 4 * 2 + i % 2 > last) scores.x[m][n][i] = -infinity();
                }
        }

        float largest[BLOCKS][2];  // scores of this lane, scaled
        bool rises = false;
        #pragma unroll
        for (int m = 0; m < BLOCKS; m++)
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = scores.x[m][0][2 * half];
                #pragma unroll
                for (int n = 0; n < KEYS / 8; n++) x = fmaxf(x, fmaxf(scores.x[m][n][2 * half], scores.x[m][n][2 * half + 1]));
                largest[m][half] = x * a.scale_log2;
                rises |= largest[m][half] > reference[m][half] + LAG;
            }
        if (any_lane(rises)) {
            #pragma unroll
            for (int m = 0; m < BLOCKS; m++)
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    float x = fmaxf(largest[m][half], from_lane_xor(largest[m][half], 1));
                    x = fmaxf(reference[m][half], fmaxf(x, from_lane_xor(x, 2)));
                    float shrink = power_of_2(reference[m][half] - x);
                    reference[m][half] = x;
                    total[m][half] *= shrink;
                    #pragma unroll
                    for (int n = 0; n < HEAD_DIM / 8; n++) {
                        sum.x[m][n][2 * half] *= shrink;
                        sum.x[m][n][2 * half + 1] *= shrink;
                    }
                }
        }

        #pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {  // 16 keys at a time: P, then P V
            uint32_t p[BLOCKS][4];
            #pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                #pragma unroll
                for (int j = 2 * n; j < 2 * n + 2; j++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float x = power_of_2(scores.x[m][j][i] * a.scale_log2 - reference[m][i / 2]);
                        scores.x[m][j][i] = x;
                        total[m][i / 2] += x;
                    }
                scores.as_operand(p[m], m, n);
            }
            sum.add_rows(p, v_reader, n);
        }
    }

    float inverse[BLOCKS][2];
    #pragma unroll
    for (int m = 0; m < BLOCKS; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = total[m][half];
            x += from_lane_xor(x, 1);
            x += from_lane_xor(x, 2);
            inverse[m][half] = 1.0f / x;
            int row = first + warp_row + m * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && row < a.num_queries)
                a.lse[int64_t(batch_head) * a.num_queries + row] = (reference[m][half] + log2f(x)) * 0.69314718056f;
        }
    // The warp's own rows of Q are free: only the warp itself read them.
    sum.store(out, first + warp_row, a.num_queries, a.head_dim, q_tile, warp_row, inverse);
}
