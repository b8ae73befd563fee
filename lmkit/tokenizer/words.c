/* Encoding a chunk of text, in C: the same steps as chunk_encoder.py, one word after the other.
 *
 *   for every word (word_end):  look it up in the table of known words;
 *                               if it is new, merge its bytes (merge_word) and remember the tokens;
 *                               copy its tokens to the output.
 *
 * No globals, no I/O. One engine serves one thread. native.py compiles and calls this.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OTHER, LETTER, NUMBER, SPACE };          /* pattern.CharacterClass */
enum { NEVER = INT32_MAX };                     /* the rank of a pair that is not merged */
enum { SHORT_WORD = 64 };                       /* bytes; beyond, merging uses a heap */
enum { LONGEST_REMEMBERED = 1 << 12 };          /* bytes */
enum { FIRST_CAPACITY = 1 << 14, MOST_WORDS = 1 << 19, MOST_BYTES = 1 << 25 };

typedef struct {
    uint64_t pair;                              /* left << 32 | right, plus 1; 0: free */
    int32_t rank, merged;
} Merge;

/* A known word. Up to 15 bytes it is its own key: the bytes, padded with zeros, and the length in the topmost byte.
 * A longer one has a hash of its bytes in key[0], and its bytes in the arena. */
typedef struct {
    uint64_t key[2];
    int32_t tokens;                             /* how many; 0: a free slot */
    int32_t first;                              /* the token itself if there is one, else where they begin in the arena */
    int64_t text;                               /* where the bytes begin in the arena */
} Word;

typedef struct {
    int32_t *data;
    int64_t used, capacity;
} Tokens;

typedef struct {
    uint8_t *data;
    int64_t used, capacity;
} Bytes;

typedef struct {
    const uint8_t *classes;                     /* of every code point; borrowed */
    int32_t byte_ids[256];
    Merge *merges;
    uint64_t merges_mask;
    Word *words;
    int64_t num_words, capacity;
    Tokens tokens;
    Bytes texts;
    Tokens scratch;                             /* the tokens of the word being merged */
} Engine;

/* ---- words: GPT-2's pattern */

/* The class of the character at p (valid UTF-8), and how many bytes it has. */
static inline int class_at(const Engine *engine, const uint8_t *p, int *size)
{
    uint32_t c = p[0];
    if (c < 0x80) {
        *size = 1;
    } else if (c < 0xE0) {
        *size = 2;
        c = (c & 0x1F) << 6 | (p[1] & 0x3F);
    } else if (c < 0xF0) {
        *size = 3;
        c = (c & 0x0F) << 12 | (p[1] & 0x3F) << 6 | (p[2] & 0x3F);
    } else {
        *size = 4;
        c = (c & 0x07) << 18 | (p[1] & 0x3F) << 12 | (p[2] & 0x3F) << 6 | (p[3] & 0x3F);
    }
    return engine->classes[c];
}

/* The end of the run of characters of one class that begins at p. */
static const uint8_t *run_end(const Engine *engine, const uint8_t *p, const uint8_t *end, int kind)
{
    int size;
    while (p < end && class_at(engine, p, &size) == kind)
        p += size;
    return p;
}

/* The end of a contraction whose apostrophe is at p; NULL if there is none. */
static const uint8_t *contraction_end(const uint8_t *p, const uint8_t *end)
{
    if (end - p >= 2 && (p[1] == 's' || p[1] == 'd' || p[1] == 'm' || p[1] == 't'))
        return p + 2;
    if (end - p >= 3 && ((p[1] == 'l' && p[2] == 'l') || (p[1] == 'v' && p[2] == 'e') || (p[1] == 'r' && p[2] == 'e')))
        return p + 3;
    return NULL;
}

/* The end of the word that begins at p; the text between special tokens ends at end. The branches are the pattern's:
 * '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static const uint8_t *word_end(const Engine *engine, const uint8_t *p, const uint8_t *end)
{
    int size;
    const uint8_t *after;
    if (*p == '\'' && (after = contraction_end(p, end)))
        return after;
    const uint8_t *q = p + (*p == ' ' && p + 1 < end);
    int kind = class_at(engine, q, &size);
    if (kind != SPACE)
        return run_end(engine, q + size, end, kind);
    const uint8_t *last = p;                    /* white space: the last character of it belongs to what follows */
    for (q = p; q < end && class_at(engine, q, &size) == SPACE; q += size)
        last = q;
    return q == end || last == p ? q : last;
}

/* ---- merges */

static inline uint64_t mix(uint64_t x)
{
    x *= 0x9E3779B97F4A7C15u;
    return x ^ x >> 32;
}

static inline const Merge *find_merge(const Engine *engine, int32_t left, int32_t right)
{
    uint64_t pair = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) + 1;
    uint64_t slot = mix(pair) & engine->merges_mask;
    while (engine->merges[slot].pair && engine->merges[slot].pair != pair)
        slot = (slot + 1) & engine->merges_mask;
    return &engine->merges[slot];               /* a free slot has rank NEVER */
}

/* Merge at most SHORT_WORD bytes by looking for the best pair again and again; returns the number of tokens. */
static int64_t merge_short(const Engine *engine, const uint8_t *word, int64_t size, int32_t *token)
{
    int32_t rank[SHORT_WORD], merged[SHORT_WORD];
    for (int64_t i = 0; i < size; i++)
        token[i] = engine->byte_ids[word[i]];
    for (int64_t i = 0; i + 1 < size; i++) {
        const Merge *merge = find_merge(engine, token[i], token[i + 1]);
        rank[i] = merge->rank;
        merged[i] = merge->merged;
    }
    while (size > 1) {
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < size; i++)
            if (rank[i] < rank[best])
                best = i;
        if (rank[best] == NEVER)
            break;
        token[best] = merged[best];
        size--;
        for (int64_t i = best + 1; i < size; i++) {
            token[i] = token[i + 1];
            rank[i] = rank[i + 1];              /* the last one is read beyond the pairs, and never used */
            merged[i] = merged[i + 1];
        }
        for (int64_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < size; i++) {
            const Merge *merge = find_merge(engine, token[i], token[i + 1]);
            rank[i] = merge->rank;
            merged[i] = merge->merged;
        }
    }
    return size;
}

/* A pair that waits to be merged: rank in the upper half, place in the lower, so that integers compare rightly. */
static void heap_push(uint64_t *heap, int64_t *size, uint64_t entry)
{
    int64_t i = (*size)++;
    for (; i > 0 && heap[(i - 1) / 2] > entry; i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = entry;
}

static uint64_t heap_pop(uint64_t *heap, int64_t *size)
{
    uint64_t top = heap[0], moved = heap[--*size];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < *size; i = child) {
        child += child + 1 < *size && heap[child + 1] < heap[child];
        if (heap[child] >= moved)
            break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
    return top;
}

/* The same for a word of any length in n log n: a linked list of tokens, and a heap of pairs whose stale entries are
 * skipped. Returns the number of tokens, -1 without memory. */
static int64_t merge_long(const Engine *engine, const uint8_t *word, int64_t size, int32_t *token)
{
    int32_t *next = malloc(sizeof(int32_t) * size), *previous = malloc(sizeof(int32_t) * size);
    uint64_t *heap = malloc(sizeof(uint64_t) * 3 * size);   /* a pair at every place, and two more for every merge */
    if (!next || !previous || !heap || size > INT32_MAX) {
        free(next), free(previous), free(heap);
        return -1;
    }
    int64_t heap_size = 0, left = 0;
    for (int64_t i = 0; i < size; i++) {
        token[i] = engine->byte_ids[word[i]];
        next[i] = i + 1;
        previous[i] = i - 1;
    }
    for (int64_t i = 0; i + 1 < size; i++) {
        int32_t rank = find_merge(engine, token[i], token[i + 1])->rank;
        if (rank != NEVER)
            heap_push(heap, &heap_size, (uint64_t)rank << 32 | (uint64_t)i);
    }
    while (heap_size) {
        uint64_t entry = heap_pop(heap, &heap_size);
        int32_t i = (int32_t)entry, second = next[i];
        if (token[i] < 0 || second == size)
            continue;
        const Merge *merge = find_merge(engine, token[i], token[second]);
        if (merge->rank != (int32_t)(entry >> 32))
            continue;
        token[i] = merge->merged;
        token[second] = -1;
        next[i] = next[second];
        if (next[i] < size)
            previous[next[i]] = i;
        for (int side = 0; side < 2; side++) {
            int32_t from = side ? i : previous[i];
            if (from < 0 || next[from] == size)
                continue;
            int32_t rank = find_merge(engine, token[from], token[next[from]])->rank;
            if (rank != NEVER)
                heap_push(heap, &heap_size, (uint64_t)rank << 32 | (uint32_t)from);
        }
    }
    for (int64_t i = 0; i < size; i = next[i])
        token[left++] = token[i];
    free(next), free(previous), free(heap);
    return left;
}

/* ---- known words */

/* The first `size` (at most 8) bytes at p as an integer; nothing is read at or beyond end. */
static inline uint64_t integer_at(const uint8_t *p, int64_t size, const uint8_t *end)
{
    uint64_t x = 0;
    memcpy(&x, p, end - p >= 8 ? 8 : end - p);
    return size >= 8 ? x : x & (((uint64_t)1 << 8 * size) - 1);
}

static inline void key_of(const uint8_t *word, int64_t size, const uint8_t *end, uint64_t key[2])
{
    if (size <= 15) {
        key[0] = integer_at(word, size, end);
        key[1] = (size > 8 ? integer_at(word + 8, size - 8, end) : 0) | (uint64_t)size << 56;
        return;
    }
    uint64_t hash = 0;
    for (int64_t i = 0; i < size; i += 8)
        hash = mix(hash ^ integer_at(word + i, size - i, end)) + i;
    key[0] = hash;
    key[1] = (uint64_t)16 << 56 | (uint64_t)size;
}

static inline uint64_t slot_of(const Engine *engine, const uint64_t key[2])
{
    return mix(key[0] ^ key[1] * 0xC2B2AE3D27D4EB4Fu) & (engine->capacity - 1);
}

static int make_words(Engine *engine, int64_t capacity)
{
    Word *old = engine->words, *words = calloc(capacity, sizeof(Word));
    int64_t old_capacity = old ? engine->capacity : 0;
    if (!words)
        return -1;
    engine->words = words;
    engine->capacity = capacity;
    for (int64_t i = 0; i < old_capacity; i++) {
        if (!old[i].tokens)
            continue;
        uint64_t slot = slot_of(engine, old[i].key);
        while (words[slot].tokens)
            slot = (slot + 1) & (capacity - 1);
        words[slot] = old[i];
    }
    free(old);
    return 0;
}

/* Make room for `more` items of `width` bytes. */
static int reserve(void **data, int64_t *capacity, int64_t used, int64_t more, int64_t width)
{
    if (used + more <= *capacity)
        return 0;
    int64_t wanted = 2 * (used + more);
    void *grown = realloc(*data, wanted * width);
    if (!grown)
        return -1;
    *data = grown;
    *capacity = wanted;
    return 0;
}

/* Put the tokens of a word, merged anew, into engine->scratch; returns how many. */
static int64_t merge_word(Engine *engine, const uint8_t *word, int64_t size)
{
    Tokens *scratch = &engine->scratch;
    if (reserve((void **)&scratch->data, &scratch->capacity, 0, size, sizeof(int32_t)))
        return -1;
    return size <= SHORT_WORD ? merge_short(engine, word, size, scratch->data)
                              : merge_long(engine, word, size, scratch->data);
}

/* Fill the free slot `known` with a word and its tokens, which are in engine->scratch. */
static int remember(Engine *engine, Word *known, const uint64_t key[2], const uint8_t *word, int64_t size, int64_t count)
{
    Tokens *tokens = &engine->tokens;
    Bytes *texts = &engine->texts;
    if (reserve((void **)&tokens->data, &tokens->capacity, tokens->used, count, sizeof(int32_t))
        || reserve((void **)&texts->data, &texts->capacity, texts->used, size, 1))
        return -1;
    known->key[0] = key[0];
    known->key[1] = key[1];
    known->tokens = (int32_t)count;
    known->first = engine->scratch.data[0];
    if (count > 1) {
        known->first = (int32_t)tokens->used;
        memcpy(tokens->data + tokens->used, engine->scratch.data, count * sizeof(int32_t));
        tokens->used += count;
    }
    if (size > 15) {
        known->text = texts->used;
        memcpy(texts->data + texts->used, word, size);
        texts->used += size;
    }
    if (2 * ++engine->num_words > engine->capacity)
        return make_words(engine, 2 * engine->capacity);
    return 0;
}

static inline int is_word(const Engine *engine, const Word *known, const uint64_t key[2], const uint8_t *word, int64_t size)
{
    return known->key[0] == key[0] && known->key[1] == key[1]
        && (size <= 15 || !memcmp(engine->texts.data + known->text, word, size));
}

/* Write the tokens of one word to out; returns how many, -1 without memory. */
static inline int64_t encode_word(Engine *engine, const uint8_t *word, int64_t size, const uint8_t *end, int32_t *out)
{
    if (size > LONGEST_REMEMBERED) {
        int64_t count = merge_word(engine, word, size);
        if (count > 0)
            memcpy(out, engine->scratch.data, count * sizeof(int32_t));
        return count;
    }
    uint64_t key[2];
    key_of(word, size, end, key);
    uint64_t slot = slot_of(engine, key);
    Word *known;
    while ((known = &engine->words[slot])->tokens) {
        if (is_word(engine, known, key, word, size)) {
            if (known->tokens == 1)
                *out = known->first;
            else
                memcpy(out, engine->tokens.data + known->first, known->tokens * sizeof(int32_t));
            return known->tokens;
        }
        slot = (slot + 1) & (engine->capacity - 1);
    }
    int64_t count = merge_word(engine, word, size);
    if (count < 0)
        return -1;
    memcpy(out, engine->scratch.data, count * sizeof(int32_t));
    return remember(engine, known, key, word, size, count) ? -1 : count;
}

/* ---- called from Python */

void lmkit_free(Engine *engine)
{
    if (!engine)
        return;
    free(engine->merges), free(engine->words);
    free(engine->tokens.data), free(engine->texts.data), free(engine->scratch.data);
    free(engine);
}

/* A new engine; NULL without memory. `classes` is borrowed: it must outlive the engine. */
Engine *lmkit_new(const uint8_t *classes, const int32_t *byte_ids, const int32_t *left, const int32_t *right,
                  const int32_t *merged, int64_t num_merges)
{
    uint64_t capacity = 16;
    while (capacity < 4 * (uint64_t)num_merges)
        capacity *= 2;
    Engine *engine = calloc(1, sizeof(Engine));
    if (!engine)
        return NULL;
    engine->classes = classes;
    memcpy(engine->byte_ids, byte_ids, sizeof engine->byte_ids);
    engine->merges_mask = capacity - 1;
    engine->merges = malloc(capacity * sizeof(Merge));
    if (!engine->merges || make_words(engine, FIRST_CAPACITY)) {
        lmkit_free(engine);
        return NULL;
    }
    for (uint64_t i = 0; i < capacity; i++)
        engine->merges[i] = (Merge){0, NEVER, 0};
    for (int64_t i = 0; i < num_merges; i++) {
        Merge *slot = (Merge *)find_merge(engine, left[i], right[i]);
        if (!slot->pair)                        /* a pair that is listed twice keeps its first rank */
            *slot = (Merge){((uint64_t)(uint32_t)left[i] << 32 | (uint32_t)right[i]) + 1, (int32_t)i, merged[i]};
    }
    return engine;
}

/* Encode `size` bytes of valid UTF-8 that hold `num_specials` special tokens (start, end, id), ascending. `out` has room
 * for `size` ids. Returns how many there are; -1 without memory. */
int64_t lmkit_encode(Engine *engine, const uint8_t *data, int64_t size, const int64_t *specials, int64_t num_specials,
                     int32_t *out)
{
    const uint8_t *p = data, *end = data + size;
    int32_t *const begin = out;
    if (engine->num_words > MOST_WORDS || engine->tokens.used + engine->texts.used > MOST_BYTES) {
        memset(engine->words, 0, engine->capacity * sizeof(Word));
        engine->num_words = engine->tokens.used = engine->texts.used = 0;
    }
    for (int64_t i = 0; i <= num_specials; i++) {
        const uint8_t *stop = i < num_specials ? data + specials[3 * i] : end;
        while (p < stop) {
            const uint8_t *after = word_end(engine, p, stop);
            int64_t count = encode_word(engine, p, after - p, end, out);
            if (count < 0)
                return -1;
            out += count;
            p = after;
        }
        if (i < num_specials) {
            *out++ = (int32_t)specials[3 * i + 2];
            p = data + specials[3 * i + 1];
        }
    }
    return out - begin;
}
