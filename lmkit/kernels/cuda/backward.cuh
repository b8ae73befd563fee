// FlashAttention-2 backward (Dao 2023, algorithm 2), deterministic, in one pass; README.md explains it step by step.
//
//   P = 2^(S - lse)     dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dK = dS^T Q     dQ = dS K
//
// A CTA owns KEYS keys and their sums of dK and dV. Tiles of QUERIES queries stream by, the last first. The warps work
// on transposed scores (keys x queries), 16 * BLOCKS keys in a warp. P^T and dS^T feed the products for dV and dK from
// registers, and dS goes to shared memory, for dQ. With BACKWARD_SPLIT = 2 a pair of warps shares its keys: each
// computes the scores of half of the queries and half of the columns of dV and dK, and reads the other half of P and dS.
//
// What the tiles of keys add to one tile of dQ is summed in global memory, in float32 and in the order of the keys: a
// flag counts the tiles of keys that were added, and each CTA waits for its turn. It waits only for CTAs that began
// before it, because CTAs draw their tiles as tickets.
//
// With BACKWARD_HELPERS (sm_90) more warps copy, wait for flags and raise them, while the others multiply.

#pragma once

struct Backward {
    static constexpr int WARPS = BACKWARD_WARPS, BLOCKS = BACKWARD_BLOCKS, STAGES = BACKWARD_STAGES;
    static constexpr int SPLIT = BACKWARD_SPLIT, HELPERS = BACKWARD_HELPERS;
    static constexpr int THREADS = WARPS * 32, LAUNCHED = THREADS + HELPERS * 32;  // that multiply; all
    static constexpr int COPIERS = HELPERS ? HELPERS * 32 : THREADS;  // the last ones
    static constexpr int KEYS = WARPS / SPLIT * BLOCKS * 16;
    static constexpr int QUERIES = BACKWARD_QUERIES, PART = BACKWARD_PART;  // queries of a tile; at a time
    static constexpr int COLUMNS = HEAD_DIM / SPLIT;  // of dK and dV in a warp
    static constexpr int ACROSS = WARPS / (QUERIES / 16 / BACKWARD_DQ_BLOCKS);  // warps beside each other in a tile of dQ
    static constexpr int DQ_COLUMNS = HEAD_DIM / ACROSS;
    static_assert(DQ_COLUMNS % 16 == 0 && DQ_COLUMNS * ACROSS == HEAD_DIM, "warps do not divide a tile of dQ");
    static_assert(STAGES > 1 || !HELPERS, "helpers copy the next stage");
    static_assert(SPLIT == 1 || SPLIT == 2 && QUERIES == 2 * PART, "a pair of warps has two parts of the queries");
    using Keys = Tile<KEYS, HEAD_DIM>;
    using Queries = Tile<QUERIES, HEAD_DIM>;
    using Scores = Tile<KEYS, QUERIES>;  // dS^T, and with SPLIT = 2 P^T
    static constexpr int STATISTICS = QUERIES * 8;
    static constexpr int STAGE = 2 * Queries::BYTES + STATISTICS;
    static constexpr int BYTES = 2 * Keys::BYTES + SPLIT * Scores::BYTES + STAGES * STAGE;
};

// Before the pass: lse * log2(e) and delta = rowsum(dO * O) of every query, zeros past the last; flags down.
__global__ void statistics_kernel(const __grid_constant__ Arguments a) {
    constexpr int LANES = HEAD_DIM % 64 == 0 ? 8 : 4;  // of a row
    const int padded = ceil_div(a.num_queries, Backward::QUERIES) * Backward::QUERIES;
    const int64_t place = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
    const int64_t rows = int64_t(a.batch) * a.heads * padded;
    const int batch_head = place / padded, row = place % padded;
    const bool inside = place < rows && row < a.num_queries;
    float delta = 0.0f;
    if (inside) {
        const Head out(a.out, batch_head / a.heads, batch_head % a.heads);
        const Head dout(a.dout, batch_head / a.heads, batch_head % a.heads);
        for (int column = threadIdx.x % LANES * 8; column < a.head_dim; column += LANES * 8) {
            uint4 x = *reinterpret_cast<const uint4*>(out.data + row * out.row + column);
            uint4 y = *reinterpret_cast<const uint4*>(dout.data + row * dout.row + column);
            const uint32_t pairs[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
            for (int i = 0; i < 4; i++) {
                float2 of_out = unpack(pairs[0][i]), of_dout = unpack(pairs[1][i]);
                delta += of_out.x * of_dout.x + of_out.y * of_dout.y;
            }
        }
    }
    for (int mask = 1; mask < LANES; mask *= 2) delta += from_lane_xor(delta, mask);
    if (place < rows && threadIdx.x % LANES == 0) {
        a.statistics[2 * place] = inside ? a.lse[int64_t(batch_head) * a.num_queries + row] * 1.44269504089f : 0.0f;
        a.statistics[2 * place + 1] = delta;
        if (row % Backward::QUERIES == 0) a.turns[1 + place / Backward::QUERIES] = 0;
        if (place == 0) a.turns[0] = 0;
    }
}

__global__ void __launch_bounds__(Backward::LAUNCHED, BACKWARD_CTAS) backward_kernel(const __grid_constant__ Arguments a) {
    using B = Backward;
    constexpr int BLOCKS = B::BLOCKS, QUERIES = B::QUERIES, PART = B::PART, STAGES = B::STAGES, THREADS = B::THREADS;
    constexpr bool LATE = B::HELPERS && BACKWARD_LATE;  // scores are there early, the turn is needed late: two barriers
    const uint32_t k_tile = shared_address(shared), v_tile = k_tile + B::Keys::BYTES;
    const uint32_t ds_tile = v_tile + B::Keys::BYTES, p_tile = ds_tile + B::Scores::BYTES;
    const uint32_t stages = ds_tile + B::SPLIT * B::Scores::BYTES;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warp_row = warp / B::SPLIT * BLOCKS * 16;

    __shared__ int drawn;
    if (thread == 0) drawn = atomicAdd(a.turns, 1);
    __syncthreads();
    const int key_tiles = ceil_div(a.num_keys, B::KEYS), query_tiles = ceil_div(a.num_queries, QUERIES);
    const int key_tile = drawn % key_tiles, first_key = key_tile * B::KEYS;
    const int batch = drawn / key_tiles / a.kv_heads, kv_head = drawn / key_tiles % a.kv_heads;
    const int group = a.heads / a.kv_heads;  // query heads to a key head
    const Head k(a.k, batch, kv_head), v(a.v, batch, kv_head);

    // No query before tile `begin` sees these keys. A step is a tile of one head: the last tile first.
    const int begin = a.causal && CAUSAL_SKIP ? first_key / QUERIES : 0;
    const int each = max(query_tiles - begin, 0), steps = each * group;

    auto completes = [&](int tile) {  // no key after these adds to this tile of dQ
        int keys = a.causal && CAUSAL_SKIP ? min(tile * QUERIES + QUERIES, a.num_keys) : a.num_keys;
        return key_tile == (keys - 1) / B::KEYS;
    };
    const int copier = thread - (B::LAUNCHED - B::COPIERS);  // below 0: copies nothing
    auto load_step = [&](int step) {
        if (step < steps) {
            const uint32_t stage = stages + step % STAGES * B::STAGE;
            const int head = kv_head * group + step / each, tile = query_tiles - 1 - step % each;
            const Head q(a.q, batch, head), dout(a.dout, batch, head);
            B::Queries::load<B::COPIERS>(copier, stage, q, tile * QUERIES, a.num_queries, a.head_dim);
            B::Queries::load<B::COPIERS>(copier, stage + B::Queries::BYTES, dout, tile * QUERIES, a.num_queries, a.head_dim);
            const float* from = a.statistics + (int64_t(batch * a.heads + head) * query_tiles + tile) * QUERIES * 2;
            if (copier < QUERIES / 2) copy_16_bytes(stage + 2 * B::Queries::BYTES + copier * 16, from + copier * 4, true);
        }
        close_copies();
    };
    auto load_keys = [&] {
        B::Keys::load<B::COPIERS>(copier, k_tile, k, first_key, a.num_keys, a.head_dim);
        B::Keys::load<B::COPIERS>(copier, v_tile, v, first_key, a.num_keys, a.head_dim);
        for (int step = 0; step < STAGES - 1; step++) load_step(step);
    };
#if BACKWARD_HELPERS
    if (warp >= B::WARPS) {
        keep_24_registers();
        load_keys();
        int* done = nullptr;
        for (int step = 0; step < steps; step++) {
            const int head = batch * a.heads + kv_head * group + step / each, tile = query_tiles - 1 - step % each;
            int* const flag = a.turns + 1 + int64_t(head) * query_tiles + tile;
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // this barrier and those that follow are those of a step below
            if (copier == 0) {
                if (done) raise_flag(done, key_tile + 1);
                wait_for_flag(flag, key_tile);
            }
            __syncwarp();
            if (LATE && copier < 32) arrive<2>(THREADS + 32);
            load_step(step + STAGES - 1);
            if (!LATE) __syncthreads();
            done = completes(tile) ? nullptr : flag;
        }
        wait_for_copies<0>();
        __syncthreads();
        if (copier == 0 && done) raise_flag(done, key_tile + 1);
        return;
    }
    take_240_registers();
#else
    load_keys();
#endif

    Sums<BLOCKS, B::COLUMNS> dk, dv;
    const int columns = warp % B::SPLIT * B::COLUMNS / 16;  // the first of dK and dV, in blocks
    const Reader<HEAD_DIM, true> k_reader(k_tile + warp_row * HEAD_DIM * 2), v_reader(v_tile + warp_row * HEAD_DIM * 2);
    int* written = nullptr;  // the flag of a tile of dQ that all threads wrote before the next barrier

    for (int step = 0; step < steps; step++) {
        const int head = batch * a.heads + kv_head * group + step / each, tile = query_tiles - 1 - step % each;
        if (STAGES == 1) {
            __syncthreads();  // all warps are done with the step before
            load_step(step);
        }
        if (!B::HELPERS) wait_for_copies<STAGES == 1 ? 0 : STAGES - 2>();
        __syncthreads();  // the copies are there; the stage before, its scores and its part of dQ are done
        if (!B::HELPERS && written && thread == 0) raise_flag(written, key_tile + 1);
        if (STAGES > 1 && !B::HELPERS) load_step(step + STAGES - 1);
        const uint32_t q_tile = stages + step % STAGES * B::STAGE, dout_tile = q_tile + B::Queries::BYTES;
        const uint32_t statistics = dout_tile + B::Queries::BYTES;
        const bool cut = first_key + B::KEYS > a.num_keys || (a.causal && tile * QUERIES < first_key + B::KEYS - 1);

        #pragma unroll
        for (int i = 0; i < QUERIES / PART / B::SPLIT; i++) {
            const int part = B::SPLIT * i + warp % B::SPLIT;
            const uint32_t down = part * PART * HEAD_DIM * 2;
            Sums<BLOCKS, PART> p, ds;  // transposed; first S^T = K Q^T and dP^T = V dO^T
            const Reader<HEAD_DIM, false> q_columns(q_tile + down), dout_columns(dout_tile + down);
            p.add_transposed(k_reader, q_columns);
            ds.add_transposed(v_reader, dout_columns);
            if (cut) {
                #pragma unroll
                for (int n = 0; n < PART / 8; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int query = tile * QUERIES + part * PART + n * 8 + lane % 4 * 2 + i % 2;
                        int last = a.causal ? min(query, a.num_keys - 1) : a.num_keys - 1;
                        #pragma unroll
                        for (int m = 0; m < BLOCKS; m++)
                            if (first_key + warp_row + m * 16 + i / 2 * 8 + lane / 4 > last) p.x[m][n][i] = -infinity();
                    }
            }
            #pragma unroll
            for (int n = 0; n < PART / 8; n++) {
                // lse, delta of this lane's first query, then of its second
                uint4 bits = load_shared(statistics + (part * PART + n * 8 + lane % 4 * 2) * 8);
                float lse[2] = {__uint_as_float(bits.x), __uint_as_float(bits.z)};
                float delta[2] = {__uint_as_float(bits.y), __uint_as_float(bits.w)};
                #pragma unroll
                for (int m = 0; m < BLOCKS; m++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        p.x[m][n][i] = power_of_2(p.x[m][n][i] * a.scale_log2 - lse[i % 2]);
                        ds.x[m][n][i] = p.x[m][n][i] * (ds.x[m][n][i] - delta[i % 2]);
                    }
            }
            // Where this lane writes its first pair; the others are a few turned chunks and whole rows away.
            const uint32_t place = B::Scores::pair(0, warp_row + lane / 4, part * PART + lane % 4 * 2);
            #pragma unroll
            for (int n = 0; n < PART / 16; n++) {
                uint32_t p_left[BLOCKS][4], ds_left[BLOCKS][4];
                #pragma unroll
                for (int m = 0; m < BLOCKS; m++) {
                    p.as_operand(p_left[m], m, n);
                    ds.as_operand(ds_left[m], m, n);
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const uint32_t to = (place ^ (2 * n + i / 2) * 16) + (m * 16 + i % 2 * 8) * QUERIES * 2;
                        if (B::SPLIT > 1) store_shared(p_tile + to, p_left[m][i]);
                        store_shared(ds_tile + to, ds_left[m][i]);
                    }
                }
                dv.add_rows(p_left, Reader<HEAD_DIM, true>(dout_tile + down, columns), n);
                dk.add_rows(ds_left, Reader<HEAD_DIM, true>(q_tile + down, columns), n);
            }
        }

        const int64_t place = int64_t(head) * query_tiles + tile;
        int* const flag = a.turns + 1 + place;
        if (!B::HELPERS && thread == 0) wait_for_flag(flag, key_tile);
        if (LATE) meet<1>(THREADS);  // the scores are there
        else __syncthreads();  // and it is this CTA's turn to add to the tile of dQ
        if (B::SPLIT > 1) {  // the queries whose scores the other warp of the pair computed
            const int other = 1 - warp % 2;
            const uint32_t down = other * PART * HEAD_DIM * 2;
            const Reader<QUERIES, true> p_rows(p_tile + warp_row * QUERIES * 2, other * PART / 16);
            const Reader<QUERIES, true> ds_rows(ds_tile + warp_row * QUERIES * 2, other * PART / 16);
            const Reader<HEAD_DIM, true> q_rows(q_tile + down, columns), dout_rows(dout_tile + down, columns);
            #pragma unroll
            for (int n = 0; n < PART / 16; n++) {
                uint32_t left[BLOCKS][4];
                #pragma unroll
                for (int m = 0; m < BLOCKS; m++) read_matrices(left[m], p_rows.at(m, n));
                dv.add_rows(left, dout_rows, n);
                #pragma unroll
                for (int m = 0; m < BLOCKS; m++) read_matrices(left[m], ds_rows.at(m, n));
                dk.add_rows(left, q_rows, n);
            }
        }

        Sums<BACKWARD_DQ_BLOCKS, B::DQ_COLUMNS> dq;
        float4* const sum = reinterpret_cast<float4*>(a.dq_sum + place * QUERIES * HEAD_DIM) + thread;
        const int dq_row = warp / B::ACROSS * BACKWARD_DQ_BLOCKS, dq_column = warp % B::ACROSS * B::DQ_COLUMNS;
        const Reader<QUERIES, false> ds_reader(ds_tile, dq_row);
        const Reader<HEAD_DIM, true> key_rows(k_tile, dq_column / 16);
        #pragma unroll
        for (int key = 0; key < B::KEYS / 16; key++) {
            uint32_t ds_part[BACKWARD_DQ_BLOCKS][4];
            #pragma unroll
            for (int m = 0; m < BACKWARD_DQ_BLOCKS; m++) read_transposed(ds_part[m], ds_reader.at(key, m));
            dq.add_rows(ds_part, key_rows, key);
        }
        if (LATE) meet<2>(THREADS + 32);  // it is this CTA's turn
        if (!completes(tile)) {
            #pragma unroll
            for (int m = 0; m < BACKWARD_DQ_BLOCKS; m++)
                #pragma unroll
                for (int n = 0; n < B::DQ_COLUMNS / 8; n++) {
                    float4 x = make_float4(dq.x[m][n][0], dq.x[m][n][1], dq.x[m][n][2], dq.x[m][n][3]);
                    if (key_tile > 0) add_for_all(sum + (m * (B::DQ_COLUMNS / 8) + n) * THREADS, x);
                    else store_for_all(sum + (m * (B::DQ_COLUMNS / 8) + n) * THREADS, x);
                }
            written = flag;
        } else {  // no key after these: dQ is complete
            written = nullptr;
            if (key_tile > 0) {
                #pragma unroll
                for (int m = 0; m < BACKWARD_DQ_BLOCKS; m++)
                    #pragma unroll
                    for (int n = 0; n < B::DQ_COLUMNS / 8; n++) {
                        float4 x = load_from_all(sum + (m * (B::DQ_COLUMNS / 8) + n) * THREADS);
                        dq.x[m][n][0] += x.x, dq.x[m][n][1] += x.y, dq.x[m][n][2] += x.z, dq.x[m][n][3] += x.w;
                    }
            }
            const Head dq_head(a.dq, batch, head - batch * a.heads);
            #pragma unroll
            for (int m = 0; m < BACKWARD_DQ_BLOCKS; m++)
                #pragma unroll
                for (int n = 0; n < B::DQ_COLUMNS / 8; n++)
                    #pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int query = tile * QUERIES + (dq_row + m) * 16 + half * 8 + lane / 4;
                        int column = dq_column + n * 8 + lane % 4 * 2;
                        if (query < a.num_queries && column < a.head_dim)
                            *reinterpret_cast<uint32_t*>(dq_head.data + query * dq_head.row + column) =
                                pack(dq.x[m][n][2 * half] * a.scale, dq.x[m][n][2 * half + 1] * a.scale);
                    }
        }
    }

    wait_for_copies<0>();
    __syncthreads();  // K and V are free, and dQ is written
    if (!B::HELPERS && written && thread == 0) raise_flag(written, key_tile + 1);
    float ones[BLOCKS][2], scales[BLOCKS][2];
    #pragma unroll
    for (int m = 0; m < BLOCKS; m++)
        for (int half = 0; half < 2; half++) ones[m][half] = 1.0f, scales[m][half] = a.scale;
    Head dk_head(a.dk, batch, kv_head), dv_head(a.dv, batch, kv_head);
    const int warp_column = warp % B::SPLIT * B::COLUMNS;
    dk_head.data += warp_column, dv_head.data += warp_column;
    const int own = warp * (BLOCKS * 16 * B::COLUMNS * 2);  // where this warp's part of a tile of keys begins
    dk.store(dk_head, first_key + warp_row, a.num_keys, a.head_dim - warp_column, k_tile + own, 0, scales);
    dv.store(dv_head, first_key + warp_row, a.num_keys, a.head_dim - warp_column, v_tile + own, 0, ones);
}
