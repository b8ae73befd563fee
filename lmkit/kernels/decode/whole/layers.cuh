// All layers of a decode step of a single row in one kernel: bf16 weights stream through shared memory without a pause.
//
// Each SM runs one CTA. A producer thread copies the CTA's share of every matrix and of the KV cache, in the order of
// use, into a ring of tiles in shared memory. It waits only for free places: no copy depends on a result, so the
// memory works on while the CTAs exchange results. Eight warps multiply what has arrived.
//
// CTAs exchange results as words: 16 bits hold a number, the other 16 the layer it belongs to (`tag`). A reader looks
// at the words that it needs until all of them are of its layer. No barrier of the grid is needed.
//
// A phase's words are written again one layer later. Nobody still reads them then: who writes them has read a later
// phase's words of all CTAs, which they wrote after reading.

#pragma once

#ifndef WARPS
#define WARPS 8
#endif
constexpr int THREADS = 32 * WARPS, ALL_THREADS = THREADS + 128;  // the last four warps: the producer, and three that give their registers
constexpr int GROUP = HEADS / KV_HEADS, QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM, ATTENDED = HEADS * HEAD_DIM;
constexpr int LANES = HEAD_DIM / 8;  // lanes that share a key: 16 bytes each
#ifndef ALONE
#define ALONE (WIDTH <= 1024 ? 256 : 0)  // most old keys that one CTA attends to
#endif
#ifndef PIECE
#define PIECE 1024
#endif
constexpr int STRIDE = 2 * PIECE + 64;  // bytes from row to row: rows that are read together lie in different banks
constexpr int TILE = 8 * STRIDE, KEYS_AT_ONCE = THREADS / LANES, TILE_KEYS = TILE / (2 * HEAD_DIM) / KEYS_AT_ONCE * KEYS_AT_ONCE;
constexpr int ROUND = 4 * TILE_KEYS;  // keys whose scores are kept at once
constexpr int MOST_LAYERS = 64;

constexpr int power_of_2_from(int n) { int p = 1; while (p < n) p *= 2; return p; }
constexpr int own_blocks(int columns) { return (columns / 32 + WARPS - 1) / WARPS; }  // of 32 columns that a warp multiplies
constexpr int EACH = PIECE / 32 / WARPS;  // of them in a tile
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

struct Layer { const uint16_t *qkv, *output, *gate_up, *down, *norm1, *norm2; };

struct Arguments {
    Layer layers[MOST_LAYERS];
    uint16_t *keys, *values;  // (layers, KV_HEADS, capacity, HEAD_DIM)
    const int64_t* place;     // position of the token
    const float* cos_sin;     // (capacity, HEAD_DIM / 2, 2)
    uint16_t *stream, *normed;  // (WIDTH): the residual stream, read and written; it times `gain`, written
    float* parts;               // (WIDTH / 2), sums of two squares of the stream, written
    const uint16_t* gain;       // of the norm after the last layer
    uint32_t *stream_words, *middle_words, *qkv_words, *attended_words, *hidden_words;
    uint64_t* split_words;  // (KV_HEADS, SPLITS, GROUP, HEAD_DIM + 1): results of splits, then log2 of their weights
    uint32_t* turn;         // how many steps have been made
    int num_layers, capacity;
    float eps, scale;  // scale: of scores, times log2 e
    long long* trace;
};

// The part of `count` rows that a CTA computes; parts begin at even rows.
struct Share {
    int begin, rows;
    DEVICE Share(int count, int cta, int ctas) {
        begin = count / 2 * cta / ctas * 2;
        rows = count / 2 * (cta + 1) / ctas * 2 - begin;
    }
};

constexpr int shares_rows(int count) { return (count / 2 + CTAS - 1) / CTAS * 2; }
constexpr int MOST_ROWS = larger(larger(shares_rows(QKV), 2 * shares_rows(HIDDEN)), shares_rows(WIDTH));

constexpr int SHARED_MEMORY = 232448, MOST_STAGES = 16;

struct Results {
    uint64_t full[MOST_STAGES], empty[MOST_STAGES];
    uint16_t x[larger(larger(WIDTH, HIDDEN), ATTENDED)];  // the vector that is multiplied
    uint16_t q[8][HEAD_DIM];                              // zeros from GROUP on
    float sums[2][MOST_ROWS + 8][WARPS];
    float squares[2][WARPS];
    float scores[2][GROUP][ROUND];
    float weighted[WARPS][GROUP][HEAD_DIM], totals[WARPS][GROUP];
    float new_key[HEAD_DIM], new_value[HEAD_DIM];
};

#ifndef STAGES
constexpr int STAGES = smaller(MOST_STAGES, (SHARED_MEMORY - int(sizeof(Results))) / TILE);
#endif

struct Shared : Results {
    alignas(128) char ring[STAGES][TILE];
};

// ---- the producer: eight lanes, one for each row of a tile

struct Producer {
    Shared& shared;
    int lane, number = 0;

    DEVICE void copy(const void* from, int64_t stride, int rows, int bytes) {
        int stage = number % STAGES, turn = number / STAGES;
        if (turn) wait(&shared.empty[stage], (turn - 1) & 1);
        if (lane == 0) expect(&shared.full[stage], rows * bytes);
        const char* row = static_cast<const char*>(from) + lane * stride;
        if (lane < rows) copy_in(shared.ring[stage] + lane * STRIDE, row, bytes, &shared.full[stage]);
        number++;
    }

    template <int COLUMNS> DEVICE void copy_rows(const uint16_t* from, int rows) {
        for (int row = 0; row < rows; row += 8)
            for (int column = 0; column < COLUMNS; column += PIECE)
                copy(from + int64_t(row) * COLUMNS + column, 2 * COLUMNS, min(8, rows - row), 2 * min(PIECE, COLUMNS - column));
    }
};

struct Split {
    int head, split, splits, begin, end;  // of old keys; no splits if this CTA has no part
    DEVICE Split(int cta, int old_keys) {
        head = cta / SPLITS, split = cta % SPLITS, splits = old_keys <= ALONE ? 1 : SPLITS;
        int each = (old_keys + splits - 1) / splits;
        begin = min(old_keys, split * each), end = min(old_keys, begin + each);
        if (head >= KV_HEADS || split >= splits) begin = end = 0, splits = 0;
    }
};

DEVICE void produce(const Arguments& a, Shared& shared, int cta, int lane, int old_keys) {
    Producer producer{shared, lane};
    Share qkv(QKV, cta, CTAS), width(WIDTH, cta, CTAS), hidden(HIDDEN, cta, CTAS);
    Split split(cta, old_keys);
    for (int i = 0; i < a.num_layers; i++) {
        const Layer& layer = a.layers[i];
        producer.copy_rows<WIDTH>(layer.qkv + int64_t(qkv.begin) * WIDTH, qkv.rows);
        int64_t head = (int64_t(i) * KV_HEADS + split.head) * a.capacity;
        for (int begin = split.begin; begin < split.end; begin += ROUND) {
            int end = min(split.end, begin + ROUND);
            for (int key = begin; key < end; key += TILE_KEYS)
                producer.copy(a.keys + (head + key) * HEAD_DIM, 0, 1, min(TILE_KEYS, end - key) * 2 * HEAD_DIM);
            for (int key = begin; key < end; key += TILE_KEYS)
                producer.copy(a.values + (head + key) * HEAD_DIM, 0, 1, min(TILE_KEYS, end - key) * 2 * HEAD_DIM);
        }
        producer.copy_rows<ATTENDED>(layer.output + int64_t(width.begin) * ATTENDED, width.rows);
        producer.copy_rows<WIDTH>(layer.gate_up + int64_t(hidden.begin) * WIDTH, hidden.rows);
        producer.copy_rows<WIDTH>(layer.gate_up + int64_t(HIDDEN + hidden.begin) * WIDTH, hidden.rows);
        producer.copy_rows<HIDDEN>(layer.down + int64_t(width.begin) * HIDDEN, width.rows);
    }
}

// ---- the eight warps

// Numbers and a tag in words. Of the tag 16 bits are kept: the same ones come again after 65,536 layers.
DEVICE uint32_t word_of(float x, uint32_t tag) { return tag << 16 | bits(x); }
DEVICE bool differs(uint4 x, uint32_t tag) {
#ifdef NO_WAIT
    return false;
#endif
    uint32_t t = tag << 16;
    return (((x.x ^ t) | (x.y ^ t) | (x.z ^ t) | (x.w ^ t)) & 0xffff0000u) != 0;
}
DEVICE uint64_t word_of_64(float x, uint32_t tag) { return uint64_t(tag) << 32 | __float_as_uint(x); }

struct Warps {
    const Arguments& a;
    Shared& shared;
    int cta, thread, warp, lane;
    int stage = 0, odd = 0, oldest = 0;  // the next tile, how often the ring has turned, the oldest tile held
    int phase = 0;                       // of products
    uint32_t tag = 0;
#ifdef TRACE
    long long* trace = nullptr;
    long long ring = 0;
    DEVICE void mark() { if (thread == 0) *trace++ = clock64(), *trace++ = ring; }
#else
    DEVICE void mark() {}
#endif

    DEVICE const char* next_tile() {
#ifdef TRACE
        long long began = clock64();
#endif
        wait(&shared.full[stage], odd);
#ifdef TRACE
        ring += clock64() - began;
#endif
        const char* tile = shared.ring[stage];
        if (++stage == STAGES) stage = 0, odd ^= 1;
        return tile;
    }
    DEVICE void release() {  // the oldest tile that is held
        __syncwarp();
        if (lane == 0) arrive(&shared.empty[oldest]);
        if (++oldest == STAGES) oldest = 0;
    }
    // Load this warp's columns of 8 rows.
    template <int COLUMNS> DEVICE void load(uint4 (&w)[EACH], int piece) {
        const char* weights = next_tile() + lane / 4 * STRIDE + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int block = i * WARPS + warp;
            w[i] = {0, 0, 0, 0};
            if (piece * (PIECE / 32) + block < COLUMNS / 32) w[i] = *reinterpret_cast<const uint4*>(weights + block * 64);
        }
    }

    // Read the columns of words that this warp multiplies, or plain ones; with a gain it is a norm's, see `scale_of`.
    template <int COLUMNS>
    DEVICE void read(uint4 (&x)[own_blocks(COLUMNS)], const uint32_t* words, const uint16_t* plain, const uint16_t* gain) {
        constexpr int LOADS = (own_blocks(COLUMNS) + 3) / 4;
        uint4 found[LOADS];
        uint2 gains[LOADS];
        int at[LOADS];
        uint32_t missing = 0;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int block = (4 * i + lane / 8) * WARPS + warp;
            at[i] = block * 8 + lane % 8;
            if (block < COLUMNS / 32) missing |= 1u << i;
        }
        const uint32_t inside = missing;
        if (gain)
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (inside >> i & 1) gains[i] = reinterpret_cast<const uint2*>(gain)[at[i]];
        if (plain) {
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (inside >> i & 1) {
                    uint2 pairs = reinterpret_cast<const uint2*>(plain)[at[i]];
                    found[i] = {pairs.x & 0xffff, pairs.x >> 16, pairs.y & 0xffff, pairs.y >> 16};
                }
        } else {
            while (missing) {
#pragma unroll
                for (int i = 0; i < LOADS; i++)
                    if (missing >> i & 1) found[i] = look(reinterpret_cast<const uint4*>(words) + at[i]);
#pragma unroll
                for (int i = 0; i < LOADS; i++)
                    if ((missing >> i & 1) && !differs(found[i], tag)) missing &= ~(1u << i);
                if (missing) look_again();
            }
        }
        float squares = 0;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if (!(inside >> i & 1)) continue;
            uint32_t low_pair = (found[i].y << 16) | (found[i].x & 0xffff), high_pair = (found[i].w << 16) | (found[i].z & 0xffff);
            if (gain) {
                float n[4] = {low(found[i].x), low(found[i].y), low(found[i].z), low(found[i].w)};
                float g[4] = {low(gains[i].x), high(gains[i].x), low(gains[i].y), high(gains[i].y)};
#pragma unroll
                for (int k = 0; k < 4; k++) squares += n[k] * n[k], n[k] *= g[k];
                low_pair = bits(n[1]) << 16 | bits(n[0]), high_pair = bits(n[3]) << 16 | bits(n[2]);
            }
            reinterpret_cast<uint2*>(shared.x)[at[i]] = {low_pair, high_pair};
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < own_blocks(COLUMNS); j++) {
            int block = j * WARPS + warp;
            x[j] = {0, 0, 0, 0};
            if (block < COLUMNS / 32) x[j] = reinterpret_cast<const uint4*>(shared.x)[block * 4 + lane % 4];
        }
        if (gain) {
#pragma unroll
            for (int mask = 16; mask; mask /= 2) squares += from_lane_xor(squares, mask);
            if (lane == 0) shared.squares[phase & 1][warp] = squares;
        }
    }
    template <int COLUMNS> DEVICE float scale_of() {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) squares += shared.squares[phase & 1][i];
        return rsqrtf(squares / COLUMNS + a.eps);
    }

    // Multiply `rows` rows of the ring by the vector; each warp's sums -> shared.sums, from row `first` on. Tensor cores
    // multiply the vector, as all rows of one matrix, by 8 rows of weights at a time. Columns may come in any order, if
    // they come in the same order in both: a lane takes 16 bytes of a row at once. While a tile is multiplied the next one
    // is loaded. `w0` holds the first tile.
    template <int COLUMNS>
    DEVICE void multiply(int rows, int first, const uint4 (&x)[own_blocks(COLUMNS)], uint4 (&w0)[EACH]) {
        constexpr int PIECES = (COLUMNS + PIECE - 1) / PIECE, GROUPS = PIECES % 2 ? 2 : 1;
        uint4 w[2][EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) w[0][i] = w0[i];
        for (int begin = 0; begin < rows; begin += 8 * GROUPS)
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                int row = begin + 8 * group;
                if (row >= rows) continue;
                float sums[4][4] = {};
#pragma unroll
                for (int piece = 0; piece < PIECES; piece++) {
                    const int turn = (group * PIECES + piece) & 1;
                    if (piece + 1 < PIECES || row + 8 < rows) load<COLUMNS>(w[turn ^ 1], (piece + 1) % PIECES);
#pragma unroll
                    for (int i = 0; i < EACH; i++) {
                        if (piece * EACH + i >= own_blocks(COLUMNS)) continue;
                        const uint4 &v = x[piece * EACH + i], &weights = w[turn][i];
                        multiply_add(sums[i % 2 * 2], v.x, v.x, v.y, v.y, weights.x, weights.y);
                        multiply_add(sums[i % 2 * 2 + 1], v.z, v.z, v.w, v.w, weights.z, weights.w);
                    }
                    release();
                }
                if (lane < 4)
#pragma unroll
                    for (int k = 0; k < 2; k++)
                        shared.sums[phase & 1][first + row + 2 * lane + k][warp] =
                            (sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]);
            }
    }
    DEVICE float sum_of(int row) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += shared.sums[phase & 1][row][i];
        return sum;
    }

    // Read two neighbouring numbers; rotate them (RoPE).
    DEVICE float2 pair_of(int index, int place, bool rotate) {
        float2 angle = reinterpret_cast<const float2*>(a.cos_sin)[(int64_t(place) * HEAD_DIM + index % HEAD_DIM) / 2];
        const uint64_t* at = reinterpret_cast<const uint64_t*>(a.qkv_words + index);
        uint64_t x, t = uint64_t(tag << 16) << 32 | tag << 16;
        while (((x = look(at)) ^ t) & 0xffff0000ffff0000ull) {
#ifdef NO_WAIT
            break;
#endif
            look_again();
        }
        float even = low(uint32_t(x)), odd = low(uint32_t(x >> 32));
        if (!rotate) return {even, odd};
        return {rounded(even * angle.x - odd * angle.y), rounded(odd * angle.x + even * angle.y)};
    }

    DEVICE void attend(int layer, int place) {
        Split split(cta, place);
        if (!split.splits) { mark(); mark(); return; }
        bool last = split.split == split.splits - 1;
        for (int i = 2 * thread; i < GROUP * HEAD_DIM; i += 2 * THREADS) {
            float2 q = pair_of(split.head * GROUP * HEAD_DIM + i, place, true);
            *reinterpret_cast<uint32_t*>(&shared.q[i / HEAD_DIM][i % HEAD_DIM]) = bits(q.y) << 16 | bits(q.x);
        }
        if (last)
            for (int i = 2 * (THREADS - 1 - thread); i < 2 * HEAD_DIM; i += 2 * THREADS) {  // other threads than q's
                bool key = i < HEAD_DIM;
                int d = i % HEAD_DIM;
                float2 x = pair_of((HEADS + (key ? 0 : KV_HEADS) + split.head) * HEAD_DIM + d, place, key);
                float* kept = key ? shared.new_key : shared.new_value;
                kept[d] = x.x, kept[d + 1] = x.y;
                uint16_t* cache = key ? a.keys : a.values;
                int64_t at = ((int64_t(layer) * KV_HEADS + split.head) * a.capacity + place) * HEAD_DIM + d;
                *reinterpret_cast<uint32_t*>(cache + at) = bits(x.y) << 16 | bits(x.x);
            }
        meet(THREADS);
        mark();  // 4
        int part = thread % LANES, own = thread / LANES;
        float top[GROUP], total[GROUP], sums[GROUP][8];
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            top[g] = -1e30f, total[g] = 0;
            for (int k = 0; k < 8; k++) sums[g][k] = 0;
        }
        uint4 queries[HEAD_DIM / 32];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++)
            queries[i] = reinterpret_cast<const uint4*>(shared.q[lane / 4])[4 * i + lane % 4];
        int turn = 0;
        for (int begin = split.begin; begin < split.end; begin += ROUND, turn ^= 1) {
            int all = min(ROUND, split.end - begin);
            for (int tile = 0; tile < all; tile += TILE_KEYS) {
                const char* keys = next_tile() + lane / 4 * 2 * HEAD_DIM + lane % 4 * 16;
#pragma unroll
                for (int first = 8 * warp; first < TILE_KEYS; first += 8 * WARPS) {
                    float score[2][4] = {};  // of query lane / 4 and two keys
#pragma unroll
                    for (int block = 0; block < HEAD_DIM / 32; block++) {
                        uint4 k = *reinterpret_cast<const uint4*>(keys + first * 2 * HEAD_DIM + block * 64);
                        multiply_add(score[0], queries[block].x, 0, queries[block].y, 0, k.x, k.y);
                        multiply_add(score[1], queries[block].z, 0, queries[block].w, 0, k.z, k.w);
                    }
                    int key = tile + first + lane % 4 * 2;
                    if (lane / 4 < GROUP)
#pragma unroll
                        for (int k = 0; k < 2; k++)
                            shared.scores[turn][lane / 4][key + k] =
                                key + k < all ? (score[0][k] + score[1][k]) * a.scale : -1e30f;
                }
                release();
            }
            meet(THREADS);
            int padded = (all + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS;
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float highest = top[g];
#pragma unroll 4
                for (int key = lane; key < padded; key += 32) highest = max(highest, shared.scores[turn][g][key]);
#pragma unroll
                for (int mask = 16; mask; mask /= 2) highest = max(highest, from_lane_xor(highest, mask));
                float kept = power_of_2(top[g] - highest);
                top[g] = highest, total[g] *= kept;
#pragma unroll
                for (int k = 0; k < 8; k++) sums[g][k] *= kept;
            }
            for (int tile = 0; tile < all; tile += TILE_KEYS) {
                const uint4* values = reinterpret_cast<const uint4*>(next_tile());
#pragma unroll
                for (int first = 0; first < TILE_KEYS; first += KEYS_AT_ONCE) {
                    int key = first + own;
                    uint4 v = values[key * LANES + part];
                    if (tile + key >= all) v = {0, 0, 0, 0};  // what an earlier copy left
                    uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int g = 0; g < GROUP; g++) {
                        float weight = power_of_2(shared.scores[turn][g][tile + key] - top[g]);
                        total[g] += weight;
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            sums[g][2 * i] += weight * low(pairs[i]);
                            sums[g][2 * i + 1] += weight * high(pairs[i]);
                        }
                    }
                }
                release();
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            if (last) {  // the new key, in the first group of lanes
                float score = 0;
                for (int d = lane; d < HEAD_DIM; d += 32) score += low(shared.q[g][d]) * shared.new_key[d];
#pragma unroll
                for (int mask = 16; mask; mask /= 2) score += from_lane_xor(score, mask);
                score *= a.scale;
                float highest = max(top[g], score), kept = power_of_2(top[g] - highest);
                float weight = own == 0 ? power_of_2(score - highest) : 0;
                top[g] = highest, total[g] = total[g] * kept + weight;
#pragma unroll
                for (int k = 0; k < 8; k++) sums[g][k] = sums[g][k] * kept + weight * shared.new_value[8 * part + k];
            }
#pragma unroll
            for (int mask = 16; mask >= LANES; mask /= 2) {
                total[g] += from_lane_xor(total[g], mask);
#pragma unroll
                for (int k = 0; k < 8; k++) sums[g][k] += from_lane_xor(sums[g][k], mask);
            }
            if (lane < LANES)
#pragma unroll
                for (int k = 0; k < 8; k++) shared.weighted[warp][g][8 * part + k] = sums[g][k];
            if (lane == 0) shared.totals[warp][g] = total[g];
        }
        meet(THREADS);
        uint64_t* words = a.split_words + int64_t(split.head) * SPLITS * GROUP * (HEAD_DIM + 1);
        for (int i = thread; i < GROUP * HEAD_DIM; i += THREADS) {
            int g = i / HEAD_DIM, d = i % HEAD_DIM;
            float sum = 0, weight = 0, highest = -1e30f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += shared.weighted[w][g][d], weight += shared.totals[w][g];
#pragma unroll
            for (int k = 0; k < GROUP; k++) highest = k == g ? top[k] : highest;
            if (split.splits == 1) {
                tell(a.attended_words + split.head * GROUP * HEAD_DIM + i, word_of(sum / weight, tag));
                continue;
            }
            uint64_t* at = words + (split.split * GROUP + g) * (HEAD_DIM + 1);
            tell(at + d, word_of_64(weight > 0 ? sum / weight : 0, tag));
            if (d == 0) tell(at + HEAD_DIM, word_of_64(weight > 0 ? highest + log2f(weight) : -1e30f, tag));
        }
        mark();  // 5
        if (split.splits == 1) return;
        // Merge a part of the head's results.
        constexpr int OWN = GROUP * HEAD_DIM / SPLITS;
        for (int i = thread; i < OWN; i += THREADS) {
            int index = split.split * OWN + i, g = index / HEAD_DIM, d = index % HEAD_DIM;
            uint64_t found[SPLITS][2];  // the result of each split, and log2 of its weight
            bool early;
            do {
                early = false;
#pragma unroll
                for (int s = 0; s < SPLITS; s++) {
                    const uint64_t* at = words + (s * GROUP + g) * (HEAD_DIM + 1);
                    found[s][0] = look(at + d), found[s][1] = look(at + HEAD_DIM);
                }
#pragma unroll
                for (int s = 0; s < SPLITS; s++)
                    early |= uint32_t(found[s][0] >> 32) != tag || uint32_t(found[s][1] >> 32) != tag;
#ifdef NO_WAIT
                break;
#endif
                if (early) look_again();
            } while (early);
            float weights[SPLITS], highest = -1e30f, sum = 0, total = 0;
#pragma unroll
            for (int s = 0; s < SPLITS; s++) {
                weights[s] = __uint_as_float(uint32_t(found[s][1]));
                highest = max(highest, weights[s]);
            }
#pragma unroll
            for (int s = 0; s < SPLITS; s++) {
                float weight = power_of_2(weights[s] - highest);
                total += weight, sum += weight * __uint_as_float(uint32_t(found[s][0]));
            }
            tell(a.attended_words + split.head * GROUP * HEAD_DIM + index, word_of(sum / total, tag));
        }
    }

    DEVICE void run(int place) {
        Share qkv(QKV, cta, CTAS), width(WIDTH, cta, CTAS), hidden(HIDDEN, cta, CTAS);
        float stream = thread < width.rows ? low(a.stream[width.begin + thread]) : 0;  // of this thread's row
        uint32_t first = *a.turn * a.num_layers;
#ifdef TRACE
        trace = a.trace + cta * (MOST_LAYERS * 32);
#endif
        for (int i = 0; i < a.num_layers; i++) {
            const Layer& layer = a.layers[i];
            mark();  // 0
            {
                uint4 x[own_blocks(WIDTH)], w[EACH];
                load<WIDTH>(w, 0);
                read<WIDTH>(x, a.stream_words, i == 0 ? a.stream : nullptr, layer.norm1);
                tag = first + i + 1;
                mark();  // 1
                multiply<WIDTH>(qkv.rows, 0, x, w);
            }
            mark();  // 2
            meet(THREADS);
            if (thread < qkv.rows)
                tell(a.qkv_words + qkv.begin + thread, word_of(sum_of(thread) * scale_of<WIDTH>(), tag));
            phase++;

            mark();  // 3
            attend(i, place);
            mark();  // 6

            {
                uint4 x[own_blocks(ATTENDED)], w[EACH];
                load<ATTENDED>(w, 0);
                read<ATTENDED>(x, a.attended_words, nullptr, nullptr);
                mark();  // 7
                multiply<ATTENDED>(width.rows, 0, x, w);
            }
            mark();  // 8
            meet(THREADS);
            if (thread < width.rows) {
                stream = rounded(stream + sum_of(thread));
                tell(a.middle_words + width.begin + thread, word_of(stream, tag));
            }
            phase++;

            mark();  // 9
            {
                uint4 x[own_blocks(WIDTH)], w[EACH];
                load<WIDTH>(w, 0);
                read<WIDTH>(x, a.middle_words, nullptr, layer.norm2);
                mark();  // 10
                multiply<WIDTH>(hidden.rows, 0, x, w);
                load<WIDTH>(w, 0);
                multiply<WIDTH>(hidden.rows, hidden.rows, x, w);
            }
            mark();  // 11
            meet(THREADS);
            for (int row = thread; row < hidden.rows; row += THREADS) {
                float scale = scale_of<WIDTH>();
                float gate = sum_of(row) * scale, up = sum_of(hidden.rows + row) * scale;
                tell(a.hidden_words + hidden.begin + row, word_of(gate / (1 + __expf(-gate)) * up, tag));
            }
            phase++;

            mark();  // 12
            {
                uint4 x[own_blocks(HIDDEN)], w[EACH];
                load<HIDDEN>(w, 0);
                read<HIDDEN>(x, a.hidden_words, nullptr, nullptr);
                mark();  // 13
                multiply<HIDDEN>(width.rows, 0, x, w);
            }
            mark();  // 14
            meet(THREADS);
            if (thread < width.rows) {
                stream = rounded(stream + sum_of(thread));
                tell(a.stream_words + width.begin + thread, word_of(stream, tag));
            }
            phase++;
            mark();  // 15
        }
        if (warp == 0) {
            float other = from_lane_xor(stream, 1);
            if (thread < width.rows) {
                int row = width.begin + thread;
                a.stream[row] = bits(stream);
                a.normed[row] = bits(stream * low(a.gain[row]));
                if (thread % 2 == 0) a.parts[row / 2] = stream * stream + other * other;
            }
        }
        if (cta == 0 && thread == 0) *a.turn += 1;  // all have read it: their words depend on it
    }
};

__global__ void __launch_bounds__(ALL_THREADS, 1) layers_kernel(const __grid_constant__ Arguments a) {
    static_assert(shares_rows(WIDTH) <= 32 && shares_rows(QKV) <= THREADS, "a thread finishes a row");
    static_assert(PIECE % (32 * WARPS) == 0 && STAGES >= 3, "shapes");
    static_assert(TILE_KEYS >= 1 && 32 % LANES == 0 && HEAD_DIM % 32 == 0 && KV_HEADS * SPLITS <= CTAS, "shapes");
    static_assert(GROUP * HEAD_DIM % SPLITS == 0 && WIDTH % 32 == 0 && HIDDEN % 32 == 0 && GROUP <= 8, "shapes");
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    int thread = threadIdx.x, cta = blockIdx.x;
    for (int i = thread; i < 8 * HEAD_DIM; i += ALL_THREADS) shared.q[i / HEAD_DIM][i % HEAD_DIM] = 0;
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) make_barrier(&shared.full[i], 1), make_barrier(&shared.empty[i], WARPS);
        barriers_made();
    }
    __syncthreads();
    let_the_next_kernel_begin();
    int place = int(min(*a.place, int64_t(a.capacity - 1)));
    if (thread < THREADS) {
        take_registers<WARPS == 8 ? 232 : 112>();
        Warps warps{a, shared, cta, thread, thread / 32, thread % 32};
        warps.run(place);
    } else {
        leave_registers<24>();
        if (thread < THREADS + 8) produce(a, shared, cta, thread - THREADS, place);
    }
}
