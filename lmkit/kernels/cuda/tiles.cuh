// Tiles of a head: what a call is made of, tiles in shared memory, and how warps read them as fragments.

#pragma once

struct Matrix {  // (batch, heads, rows, head_dim) in global memory, stride 1 along head_dim
    uint16_t* data;
    int64_t batch, head, row;  // strides in elements; multiples of 8
};

struct Arguments {  // mirrored by lmkit/kernels/cuda/flash.py
    Matrix q, k, v, out, dout, dq, dk, dv;
    float* lse;          // (batch, heads, num_queries), natural logarithm
    float* statistics;   // (batch * heads, padded queries, 2): lse * log2(e) and delta
    float* dq_sum;       // (batch * heads, padded queries, HEAD_DIM), each tile in the order of the lanes
    int* turns;          // a ticket, then for each tile of queries how many tiles of keys were added to dq_sum
    int batch, heads, kv_heads, num_queries, num_keys, head_dim, causal;
    float scale, scale_log2;  // scale * log2(e)
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Head {  // rows of one head
    uint16_t* data;
    int64_t row;

    __device__ Head(const Matrix& x, int batch, int head)
        : data(x.data + batch * x.batch + head * x.head), row(x.row) {}
};

// How many rows down a row's 16-byte chunks are turned: with rows of 8 or more chunks, 8 rows that are read at one
// column lie in 8 different groups of 4 banks if chunk c of row r is stored as chunk c ^ (r % 8). Rows of 4 or 12
// chunks begin in two groups, so there r / 2 turns; rows of 6 chunks begin in four, and r / 4 turns two chunks.
template <int COLUMNS>
__device__ __forceinline__ int turn(int row) {
#if SWIZZLE
    constexpr int CHUNKS = COLUMNS / 8;
    return CHUNKS % 8 == 0 ? row & 7 : CHUNKS % 4 == 0 ? (row >> 1) & 3 : (row >> 2) & 1;
#else
    return 0;
#endif
}

// A tile of rows of COLUMNS 16-bit numbers in shared memory.
template <int ROWS, int COLUMNS>
struct Tile {
    static constexpr int BYTES = ROWS * COLUMNS * 2;
    static constexpr int CHUNKS = COLUMNS / 8;

    // The address of a pair of numbers.
    static __device__ __forceinline__ uint32_t pair(uint32_t tile, int row, int column) {
        return tile + (row * CHUNKS + (column / 8 ^ turn<COLUMNS>(row))) * 16 + column % 8 * 2;
    }

    // Begin to copy rows of a head from `first` on; zeros past `length` and past `head_dim`.
    template <int THREADS, typename Integer>
    static __device__ __forceinline__ void load(Integer thread, uint32_t tile, const Head& head, int first, int length, int head_dim) {
        constexpr int STEP = THREADS / CHUNKS;  // rows that the threads copy at a time; some threads may be left over
        int row = thread / CHUNKS, chunk = thread % CHUNKS;
        int inside = chunk * 8 < head_dim ? length - first : 0;
        const uint16_t* from = head.data + (first + row) * head.row + chunk * 8;
        #pragma unroll
        for (int i = 0; i < (ROWS + STEP - 1) / STEP; i++) {
            if (STEP * CHUNKS == THREADS && ROWS % STEP == 0 || row < ROWS && thread < STEP * CHUNKS)
                copy_16_bytes(pair(tile, row, chunk * 8), from, row < inside);
            row += STEP;
            from += STEP * head.row;
        }
    }
};

// Where a lane reads 16 x 16 blocks of a tile with ldmatrix. The four 8 x 8 matrices of a block are read in the order
// BY_ROWS: top left, bottom left, top right, bottom right; else top left, top right, bottom left, bottom right.
template <int COLUMNS, bool BY_ROWS>
struct Reader {
    static constexpr int PERIOD = COLUMNS / 8 % 8 == 0 ? 4 : 2;  // blocks after which the turned chunks repeat
    // A turned chunk is a XOR, so one address gives those of the 4 blocks; few addresses leave registers for sums.
    static constexpr int KEPT = PERIOD == 4 ? 1 : 2;
    uint32_t start[KEPT];

    // `column_block` is the one that `at` calls 0, and a multiple of the blocks that are read where PERIOD is 4.
    __device__ __forceinline__ Reader(uint32_t tile, int column_block = 0) {
        int lane = threadIdx.x % 32;
        int row = BY_ROWS ? lane % 16 : lane % 8 + lane / 16 * 8;
        int chunk = BY_ROWS ? lane / 16 : lane / 8 % 2;
        #pragma unroll
        for (int i = 0; i < KEPT; i++)
            start[i] = tile + row * COLUMNS * 2 + ((2 * (column_block + i) + chunk) ^ turn<COLUMNS>(row)) * 16;
    }

    // The block 16 * row_block rows down and 16 * column_block columns to the right.
    __device__ __forceinline__ uint32_t at(int row_block, int column_block) const {
        uint32_t turned = start[column_block % KEPT] ^ (column_block % PERIOD - column_block % KEPT) * 32;
        return turned + row_block * 16 * COLUMNS * 2 + column_block / PERIOD * PERIOD * 32;
    }
};

// Rows of a product that a warp holds: BLOCKS x COLUMNS / 8 sums of 16 x 8, spread over its lanes as `multiply_add`
// says.
template <int BLOCKS, int COLUMNS>
struct Sums {
    float x[BLOCKS][COLUMNS / 8][4];

    __device__ __forceinline__ Sums() {
        #pragma unroll
        for (int m = 0; m < BLOCKS; m++)
            #pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                #pragma unroll
                for (int i = 0; i < 4; i++) x[m][n][i] = 0.0f;
    }

    // Add a times a 16 x 16 block whose fragments are b, to columns 16 * pair and the next 15.
    __device__ __forceinline__ void add(int m, int pair, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
        multiply_add(x[m][2 * pair], a, b[0], b[1]);
        multiply_add(x[m][2 * pair + 1], a, b[2], b[3]);
    }

    // Add a b^T: a begins at the reader's place, b is the COLUMNS rows of a tile.
    template <int WIDTH>
    __device__ __forceinline__ void add_transposed(const Reader<WIDTH, true>& a, const Reader<WIDTH, false>& b) {
        #pragma unroll
        for (int d = 0; d < WIDTH / 16; d++) {
            uint32_t left[BLOCKS][4], right[4];
            #pragma unroll
            for (int m = 0; m < BLOCKS; m++) read_matrices(left[m], a.at(m, d));
            #pragma unroll
            for (int n = 0; n < COLUMNS / 16; n++) {
                read_matrices(right, b.at(n, d));
                #pragma unroll
                for (int m = 0; m < BLOCKS; m++) add(m, n, left[m], right);
            }
        }
    }

    // Add left operands, 16 columns of each, times 16 rows of a tile: 16 * row_block rows down.
    template <int WIDTH>
    __device__ __forceinline__ void add_rows(
        const uint32_t (&left)[BLOCKS][4], const Reader<WIDTH, true>& rows, int row_block
    ) {
        #pragma unroll
        for (int d = 0; d < COLUMNS / 16; d++) {
            uint32_t right[4];
            read_transposed(right, rows.at(row_block, d));
            #pragma unroll
            for (int m = 0; m < BLOCKS; m++) add(m, d, left[m], right);
        }
    }

    // Columns 16 * pair and the next 15 as the left operand of the next product: the layouts agree.
    __device__ __forceinline__ void as_operand(uint32_t (&a)[4], int m, int pair) const {
        a[0] = pack(x[m][2 * pair][0], x[m][2 * pair][1]);
        a[1] = pack(x[m][2 * pair][2], x[m][2 * pair][3]);
        a[2] = pack(x[m][2 * pair + 1][0], x[m][2 * pair + 1][1]);
        a[3] = pack(x[m][2 * pair + 1][2], x[m][2 * pair + 1][3]);
    }

    // Write the rows, each times its factor, to rows of `head` from `first` on, through the warp's own rows of a tile
    // (from `row` on), so that 16 bytes go to global memory at a time.
    __device__ __forceinline__ void store(
        const Head& head, int first, int length, int head_dim, uint32_t tile, int row, const float (&factor)[BLOCKS][2]
    ) const {
        using Staged = Tile<BLOCKS * 16, COLUMNS>;
        constexpr int CHUNKS = Staged::CHUNKS;
        int lane = threadIdx.x % 32;
        #pragma unroll
        for (int m = 0; m < BLOCKS; m++)
            #pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t value = pack(x[m][n][2 * half] * factor[m][half], x[m][n][2 * half + 1] * factor[m][half]);
                    store_shared(Staged::pair(tile, row + m * 16 + half * 8 + lane / 4, n * 8 + lane % 4 * 2), value);
                }
        __syncwarp();
        for (int i = lane; i < BLOCKS * 16 * CHUNKS; i += 32) {
            int down = i / CHUNKS, chunk = i % CHUNKS;
            uint4 value = load_shared(Staged::pair(tile, row + down, chunk * 8));
            if (first + down < length && chunk * 8 < head_dim)
                *reinterpret_cast<uint4*>(head.data + (first + down) * head.row + chunk * 8) = value;
        }
    }
};
