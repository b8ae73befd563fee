/* Find the words of a text, and encode or count them: the fast form of pretokenize.py and bpe.py.
 *
 *   for every word between special tokens (next_span, word_end):
 *       Encoder: write its tokens to the output; merge the bytes of a new word, and remember its tokens.
 *       Counter: add one to its count.
 *
 * Encoder and Counter keep the words that they know in a Table. There are no globals and no I/O; an Encoder or Counter
 * serves one thread at a time. engine.py compiles this file; it and data/overlap.py call the functions that begin with
 * lmkit_.
 */
#define _DEFAULT_SOURCE                         /* madvise */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

/* Keeps the loops over the words in registers: they are some percent faster. */
#define NEVER_INLINE static __attribute__((noinline))

enum { OTHER, LETTER, NUMBER, SPACE };          /* pretokenize.character_classes */
enum { GPT2, DIGITS, LLAMA3, QWEN2 };           /* pretokenize.PATTERNS */
static const uint64_t NO_MERGE = UINT64_MAX;    /* value of a pair that is not merged */
enum { SHORT_WORD = 64 };                       /* bytes; a longer word is merged with a heap */
enum { LONGEST_REMEMBERED = 1 << 12 };          /* bytes; an Encoder does not remember longer words */
enum { FIRST_CAPACITY = 1 << 14 };              /* slots */
enum { MOST_WORDS = 349525, MOST_BYTES = 1 << 25 };  /* of an Encoder; one more word would double the slots */
enum { HUGE_PAGE = 1 << 21 };                   /* bytes */

/* ---- UTF-8 */

/* Return the 8 bytes at p as an integer, the first byte lowest. */
static inline uint64_t eight_bytes(const uint8_t *p)
{
    uint64_t x = 0;
    for (int i = 0; i < 8; i++)                 /* compilers make one load of this */
        x |= (uint64_t)p[i] << 8 * i;
    return x;
}

/* Return the number of bytes of the character at p, 0 if it is invalid (Unicode 15, table 3-7). */
static int character_size(const uint8_t *p, const uint8_t *end)
{
    int size = p[0] < 0x80 ? 1 : p[0] < 0xC2 ? 0 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : p[0] < 0xF5 ? 4 : 0;
    if (size > end - p)
        return 0;
    for (int i = 1; i < size; i++)
        if ((p[i] & 0xC0) != 0x80)
            return 0;
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F)      /* overlong; a surrogate */
        || (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F))  /* overlong; beyond U+10FFFF */
        return 0;
    return size;
}

/* Tell whether `size` bytes are valid UTF-8. */
int lmkit_is_utf8(const uint8_t *data, int64_t size)
{
    const uint8_t *p = data, *end = data + size;
    while (p < end) {
        if (end - p >= 8 && !(eight_bytes(p) & 0x8080808080808080u)) {
            p += 8;
            continue;
        }
        int bytes = character_size(p, end);
        if (!bytes)
            return 0;
        p += bytes;
    }
    return 1;
}

/* ---- classes of characters */

/* Return the class of the character at p (valid UTF-8), and set `size` to its number of bytes. */
static inline int class_at(const uint8_t *classes, const uint8_t *p, int *size)
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
    return classes[c];
}

/* ---- special tokens */

/* Strings that are one token each, as pretokenize._Strings.packed writes them: how many there are and the bytes of all
 * of this, then the arrays. The strings are sorted; those with the first byte b are first[b] to first[b + 1]. */
typedef struct {
    int32_t number;
    int only;                                   /* the byte with which all of them begin, or -1 */
    const int32_t *first, *ids, *strips, *starts;
    const uint8_t *text;                        /* the strings, joined; number i begins at starts[i] */
} Strings;

enum { STRIPS_LEFT = 1, STRIPS_RIGHT = 2 };     /* of `strips`: the token takes the whitespace there */

/* Special tokens: those to find first, and those to find in what is left. */
typedef struct {
    Strings first, second;
} Specials;

/* A piece of text, and the special token after it, or -1. */
typedef struct {
    const uint8_t *begin, *end;
    int32_t id;
} Span;

/* The place in a text up to which spans are found; `from` is NULL after the last. */
typedef struct {
    const Strings *strings;
    const uint8_t *from, *search, *end;
} Spans;

static Strings strings_from(const uint8_t *packed)
{
    const int32_t *head = (const int32_t *)packed, *first = head + 2;
    int32_t number = *head, different = 0;
    Strings strings = {number, -1, first, first + 257, first + 257 + number, first + 257 + 2 * number, NULL};
    strings.text = (const uint8_t *)(strings.starts + number + 1);
    for (int byte = 0; byte < 256; byte++)
        if (first[byte] < first[byte + 1])
            strings.only = different++ ? -1 : byte;
    return strings;
}

static Specials specials_from(const uint8_t *packed)
{
    return (Specials){strings_from(packed), strings_from(packed + ((const int32_t *)packed)[1])};
}

/* Return the first of the strings low to high, which begin alike, whose byte number `depth` is at least `byte`. */
static int32_t bound(const Strings *strings, int32_t low, int32_t high, int64_t depth, int byte)
{
    if (low < high && strings->text[strings->starts[high - 1] + depth] < byte)
        return high;
    while (low < high) {
        int32_t middle = low + (strings->text[strings->starts[low] + depth] >= byte ? 0 : (high - low) / 2);
        if (strings->text[strings->starts[middle] + depth] >= byte)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Return the longest string at p, or -1. */
static int32_t string_at(const Strings *strings, const uint8_t *p, const uint8_t *end)
{
    int32_t low = strings->first[*p], high = strings->first[*p + 1], found = -1;
    for (int64_t depth = 1; low < high; depth++) {
        if (strings->starts[low + 1] - strings->starts[low] == depth)
            found = low++;                      /* of those that begin alike the shortest is the first */
        if (p + depth == end)
            break;
        low = bound(strings, low, high, depth, p[depth]);
        high = bound(strings, low, high, depth, p[depth] + 1);
    }
    return found;
}

/* Set `span` to the next piece of text between special tokens; return 0 after the last. */
NEVER_INLINE int next_span(Spans *spans, const uint8_t *classes, Span *span)
{
    const Strings *strings = spans->strings;
    const uint8_t *p = spans->search, *end = spans->end;
    int32_t found = -1;
    int size;
    if (!spans->from)
        return 0;
    for (; strings->number && p < end; p++) {
        if (strings->only >= 0) {
            if (!(p = memchr(p, strings->only, end - p)))
                break;
        }
        if ((found = string_at(strings, p, end)) >= 0)
            break;
    }
    if (found < 0) {
        *span = (Span){spans->from, end, -1};
        spans->from = NULL;
        return 1;
    }
    const uint8_t *after = p + strings->starts[found + 1] - strings->starts[found];
    spans->search = after;
    if (strings->strips[found] & STRIPS_LEFT)
        for (const uint8_t *q = p; q > spans->from; p = q) {
            while ((*--q & 0xC0) == 0x80)       /* to the first byte of a character */
                continue;
            if (class_at(classes, q, &size) != SPACE)
                break;
        }
    if (strings->strips[found] & STRIPS_RIGHT)
        while (after < end && class_at(classes, after, &size) == SPACE)
            after += size;
    *span = (Span){spans->from, p < spans->from ? spans->from : p, strings->ids[found]};
    if (strings->strips[found] & STRIPS_LEFT && after <= spans->from)
        span->id = -1;                          /* the token before has taken all of it */
    spans->from = after;
    return 1;
}

/* ---- words: GPT-2's pattern, and others */

/* Return how many of the 8 bytes at p are ASCII letters, up to the first other byte: one step instead of eight
 * unpredictable branches. */
static inline int leading_letters(const uint8_t *p)
{
    const uint64_t each = 0x0101010101010101u;
    uint64_t x = eight_bytes(p);
    uint64_t lower = (x | 0x20 * each) & 0x7F * each;   /* bytes below 128: additions do not carry over */
    uint64_t letters = (lower + (128 - 'a') * each) & ~(lower + (127 - 'z') * each) & ~x & 128 * each;
    uint64_t others = letters ^ 128 * each;
    return others ? __builtin_ctzll(others) / 8 : 8;
}

/* Return the end of the run of characters of one class that begins at p. */
static const uint8_t *run_end(const uint8_t *classes, const uint8_t *p, const uint8_t *end, int kind)
{
    int size;
    if (kind == LETTER)
        for (int letters = 8; letters == 8 && end - p >= 8; p += letters)
            letters = leading_letters(p);
    while (p < end && class_at(classes, p, &size) == kind)
        p += size;
    return p;
}

/* Return the end of the contraction whose apostrophe is at p, or NULL. */
static const uint8_t *contraction_end(const uint8_t *p, const uint8_t *end)
{
    if (end - p >= 2 && (p[1] == 's' || p[1] == 'd' || p[1] == 'm' || p[1] == 't'))
        return p + 2;
    if (end - p >= 3 && ((p[1] == 'l' && p[2] == 'l') || (p[1] == 'v' && p[2] == 'e') || (p[1] == 'r' && p[2] == 'e')))
        return p + 3;
    return NULL;
}

/* Return the end of the word that begins at p; `end` is the next special token or the end of the text. The branches
 * are those of the pattern:
 * '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static const uint8_t *word_end(const uint8_t *classes, const uint8_t *p, const uint8_t *end)
{
    int size;
    const uint8_t *after;
    if (*p == '\'' && (after = contraction_end(p, end)))
        return after;
    const uint8_t *q = p + (*p == ' ' && p + 1 < end);
    int kind = class_at(classes, q, &size);
    if (kind != SPACE)
        return run_end(classes, q + size, end, kind);
    const uint8_t *last = p;                    /* whitespace: its last character belongs to the next word */
    for (q = p; q < end && class_at(classes, q, &size) == SPACE; q += size)
        last = q;
    return q == end || last == p ? q : last;
}

/* Return the end of the word of an Encoder's pattern that is not GPT-2's; arguments as of word_end.
 * DIGITS: '(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+ */
static const uint8_t *word_end_digits(const uint8_t *classes, const uint8_t *p, const uint8_t *end)
{
    int size, kind = class_at(classes, p, &size);
    const uint8_t *after;
    if (kind == NUMBER)
        return p + size;
    if (*p == '\'' && (after = contraction_end(p, end)))
        return after;
    const uint8_t *q = p + (*p == ' ' && p + 1 < end), *last = p;
    kind = class_at(classes, q, &size);
    if (kind == LETTER || kind == OTHER)
        return run_end(classes, q + size, end, kind);
    for (q = p; q < end && (kind = class_at(classes, q, &size)) == SPACE; q += size)
        last = q;
    return q == end || kind == NUMBER || last == p ? q : last;
}

/* Return the end of the contraction in letters of either case whose apostrophe is at p, or NULL. U+017F is an s. */
static const uint8_t *any_contraction_end(const uint8_t *p, const uint8_t *end)
{
    int left = end - p < 3 ? (int)(end - p) : 3;
    uint8_t a = left > 1 ? p[1] | 0x20 : 0, b = left > 2 ? p[2] | 0x20 : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return p + 2;
    if ((a == 'l' && b == 'l') || (a == 'v' && b == 'e') || (a == 'r' && b == 'e'))
        return p + 3;
    return left == 3 && p[1] == 0xC5 && p[2] == 0xBF ? p + 3 : NULL;
}

/* The same for LLAMA3, and for QWEN2 with {1} instead of {1,3}:
 * (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
static const uint8_t *word_end_llama(const uint8_t *classes, const uint8_t *p, const uint8_t *end, int most_numbers)
{
    int size, next_size, kind = class_at(classes, p, &size);
    const uint8_t *q = p + size, *after;
    if (kind == LETTER)
        return run_end(classes, q, end, LETTER);
    if (kind == NUMBER) {
        for (int i = 1; i < most_numbers && q < end && class_at(classes, q, &size) == NUMBER; i++)
            q += size;
        return q;
    }
    if (*p == '\'' && (after = any_contraction_end(p, end)))
        return after;
    if (*p != '\r' && *p != '\n' && q < end && class_at(classes, q, &next_size) == LETTER)
        return run_end(classes, q + next_size, end, LETTER);
    q = p + (*p == ' ' && p + 1 < end);
    if (class_at(classes, q, &size) == OTHER) {
        q = run_end(classes, q + size, end, OTHER);
        while (q < end && (*q == '\r' || *q == '\n'))
            q++;
        return q;
    }
    const uint8_t *last = p, *line = NULL;      /* the last character of the whitespace; the end of its last line */
    for (q = p; q < end && class_at(classes, q, &size) == SPACE; q += size) {
        last = q;
        if (*q == '\r' || *q == '\n')
            line = q + 1;
    }
    return line ? line : q == end || last == p ? q : last;
}

/* ---- known words */

/* A word of up to 15 bytes is its own key: the bytes, padded with zeros, and the size in the topmost byte. For a longer
 * word key[0] is a hash of its bytes, and key[1] has 16 in the topmost byte and the size below; the bytes follow the
 * key. The value follows: of a Counter the count (int64_t), of an Encoder the number of tokens and the tokens
 * (int32_t). */
typedef struct {
    uint64_t key[2];
} Word;

/* A hash table with open addressing; at most two thirds of the slots are taken. A slot has the hash of a word in its
 * upper half, and the place of the word, in units of 8 bytes plus one, in its lower half; 0 is a free slot. The words
 * are stored in the order of their appearance: so frequent words lie together, and stay in the cache. */
typedef struct {
    uint64_t *slots;
    int64_t capacity, num_words;
    uint8_t *words;
    int64_t size, room;                         /* bytes of `words` that are used, and all */
} Table;

static inline uint64_t mix(uint64_t x)
{
    x *= 0x9E3779B97F4A7C15u;
    return x ^ x >> 32;
}

/* Return the first `size` (at most 8) bytes at p as an integer, without reading at or beyond end. */
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

/* Return the number of bytes of a word. */
static inline int64_t word_size(const Word *word)
{
    int64_t size = word->key[1] >> 56;
    return size <= 15 ? size : (int64_t)(word->key[1] << 8 >> 8);
}

static inline const uint8_t *word_text(const Word *word)
{
    return (const uint8_t *)(word_size(word) <= 15 ? word : word + 1);
}

/* Return how many bytes a word of `size` bytes takes with a value of `value_size` bytes, in whole units of 8. */
static inline int64_t bytes_with(int64_t size, int64_t value_size)
{
    return sizeof(Word) + (size <= 15 ? 0 : (size + 7) & ~(int64_t)7) + ((value_size + 7) & ~(int64_t)7);
}

static inline void *value_of(const Word *word)
{
    return (uint8_t *)word + bytes_with(word_size(word), 0);
}

static inline uint32_t hash_of(const uint64_t key[2])
{
    return (uint32_t)mix(key[0] ^ key[1] * 0xC2B2AE3D27D4EB4Fu);
}

/* Return NULL for a word that is not in the table. */
static inline Word *find_word(const Table *table, const uint64_t key[2], const uint8_t *word, int64_t size)
{
    uint64_t mask = table->capacity - 1, hash = hash_of(key), entry;
    for (uint64_t slot = hash & mask; (entry = table->slots[slot]); slot = (slot + 1) & mask) {
        if (entry >> 32 != hash)
            continue;
        Word *known = (Word *)(table->words + 8 * (int64_t)((uint32_t)entry - 1));
        if (known->key[0] == key[0] && known->key[1] == key[1] && (size <= 15 || !memcmp(known + 1, word, size)))
            return known;
    }
    return NULL;
}

static void take_slot(Table *table, uint64_t entry)
{
    uint64_t mask = table->capacity - 1, slot = entry >> 32 & mask;
    while (table->slots[slot])
        slot = (slot + 1) & mask;
    table->slots[slot] = entry;
}

/* Return new memory for free(), or NULL. Large blocks are in huge pages: the first use of a table then takes a dozen
 * page faults instead of thousands, for which the threads of a process wait on each other. */
static void *allocate(int64_t size)
{
    if (size < HUGE_PAGE)
        return malloc(size);
    size = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *memory = aligned_alloc(HUGE_PAGE, size);
#ifdef MADV_HUGEPAGE
    if (memory)
        madvise(memory, size, MADV_HUGEPAGE);   /* may be refused */
#endif
    return memory;
}

/* Give the table `capacity` slots, a power of two; -1 without memory. */
static int resize(Table *table, int64_t capacity)
{
    Table resized = *table;
    resized.capacity = capacity;
    resized.slots = allocate(capacity * sizeof *resized.slots);
    if (!resized.slots)
        return -1;
    /* Not calloc: its pages would be read first and then written, which takes two faults. */
    memset(resized.slots, 0, capacity * sizeof *resized.slots);
    for (int64_t i = 0; i < table->capacity; i++)
        if (table->slots[i])
            take_slot(&resized, table->slots[i]);
    free(table->slots);
    *table = resized;
    return 0;
}

/* Give the table `room` bytes for its words; -1 without memory. */
static int extend(Table *table, int64_t room)
{
    uint8_t *words = allocate(room);
    if (!words)
        return -1;
    if (table->size)
        memcpy(words, table->words, table->size);
    free(table->words);
    table->words = words;
    table->room = room;
    return 0;
}

/* Forget all words, but keep the memory. */
static void clear(Table *table)
{
    memset(table->slots, 0, table->capacity * sizeof *table->slots);
    table->num_words = table->size = 0;
}

static void free_table(Table *table)
{
    free(table->slots), free(table->words);
}

/* Add a new word with room for a value of `value_size` bytes; NULL without memory. */
static Word *add_word(Table *table, const uint64_t key[2], const uint8_t *word, int64_t size, int64_t value_size)
{
    int64_t end = table->size + bytes_with(size, value_size);
    if (end / 8 >= UINT32_MAX || (end > table->room && extend(table, 2 * end))
        || (3 * (table->num_words + 1) > 2 * table->capacity && resize(table, 2 * table->capacity)))
        return NULL;
    Word *added = (Word *)(table->words + table->size);
    *added = (Word){{key[0], key[1]}};
    if (size > 15)
        memcpy(added + 1, word, size);
    take_slot(table, (uint64_t)hash_of(key) << 32 | (uint64_t)(table->size / 8 + 1));
    table->size = end;
    table->num_words++;
    return added;
}

/* ---- merges */

typedef struct {
    uint64_t pair;                              /* left << 32 | right, plus 1; 0: free */
    uint64_t merge;                             /* rank << 32 | merged token: the lowest is merged first */
} Merge;

typedef struct {
    const uint8_t *classes;                     /* of every code point; borrowed */
    int32_t byte_ids[256];                      /* below zero: bpe.MergeTable says what */
    Merge *merges;
    uint64_t merges_mask;
    int pattern;                                /* the place in pretokenize.PATTERNS */
    Table whole;                                /* words that are one token, with its id (int32_t) */
    Table known;
} Encoder;

/* Return the slot where a pair is, or would be. */
static inline Merge *merge_slot(const Encoder *encoder, uint64_t pair)
{
    uint64_t slot = mix(pair) & encoder->merges_mask;
    while (encoder->merges[slot].pair && encoder->merges[slot].pair != pair)
        slot = (slot + 1) & encoder->merges_mask;
    return &encoder->merges[slot];
}

static inline uint64_t pair_of(int32_t left, int32_t right)
{
    return ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) + 1;
}

static inline uint64_t find_merge(const Encoder *encoder, int32_t left, int32_t right)
{
    return merge_slot(encoder, pair_of(left, right))->merge;    /* a free slot has NO_MERGE */
}

/* Write the tokens of the bytes of a word. Return their number: a vocabulary may lack bytes. */
static int64_t byte_tokens(const Encoder *encoder, const uint8_t *word, int64_t size, int32_t *token)
{
    int64_t count = 0;
    int32_t before = 0;
    for (int64_t i = 0; i < size; i++) {
        int32_t id = encoder->byte_ids[word[i]];
        if (id >= 0)
            token[count++] = id;
        else if (id < -1 && before >= -1)
            token[count++] = -2 - id;
        before = id;
    }
    return count;
}

/* Merge a word of at most SHORT_WORD bytes by searching all pairs for each merge. Return the number of tokens. */
static int64_t merge_short(const Encoder *encoder, const uint8_t *word, int64_t size, int32_t *token)
{
    uint64_t merge[SHORT_WORD];                 /* of each token with the next */
    size = byte_tokens(encoder, word, size, token);
    for (int64_t i = 0; i + 1 < size; i++)
        merge[i] = find_merge(encoder, token[i], token[i + 1]);
    while (size > 1) {
        int64_t best = 0;
        uint64_t lowest = merge[0];
        for (int64_t i = 1; i + 1 < size; i++) {    /* without branches, which would be unpredictable */
            best = merge[i] < lowest ? i : best;
            lowest = merge[i] < lowest ? merge[i] : lowest;
        }
        if (lowest == NO_MERGE)
            break;
        token[best] = (int32_t)lowest;
        size--;
        for (int64_t i = best + 1; i < size; i++) {
            token[i] = token[i + 1];
            merge[i] = merge[i + 1];            /* the last is not a pair, and not used */
        }
        if (best > 0)
            merge[best - 1] = find_merge(encoder, token[best - 1], token[best]);
        if (best + 1 < size)
            merge[best] = find_merge(encoder, token[best], token[best + 1]);
    }
    return size;
}

/* An entry is a pair that may be merged: rank in the upper half, place in the lower half. The smallest is on top. */
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

/* Merge a word of any length in n log n steps: a linked list of tokens, and a heap of pairs, whose outdated entries are
 * skipped. Return the number of tokens, -1 without memory. */
static int64_t merge_long(const Encoder *encoder, const uint8_t *word, int64_t size, int32_t *token)
{
    size = byte_tokens(encoder, word, size, token);
    if (!size)
        return 0;
    int32_t *next = malloc(sizeof(int32_t) * size), *previous = malloc(sizeof(int32_t) * size);
    uint64_t *heap = malloc(sizeof(uint64_t) * 3 * size);   /* a pair at each place, and two for each merge */
    if (!next || !previous || !heap || size > INT32_MAX) {
        free(next), free(previous), free(heap);
        return -1;
    }
    int64_t heap_size = 0, left = 0;
    for (int64_t i = 0; i < size; i++) {
        next[i] = i + 1;
        previous[i] = i - 1;
    }
    for (int64_t i = 0; i + 1 < size; i++) {
        uint64_t merge = find_merge(encoder, token[i], token[i + 1]);
        if (merge != NO_MERGE)
            heap_push(heap, &heap_size, merge >> 32 << 32 | (uint64_t)i);
    }
    while (heap_size) {
        uint64_t entry = heap_pop(heap, &heap_size);
        int32_t i = (int32_t)entry, second = next[i];
        if (token[i] < 0 || second == size)
            continue;
        uint64_t merge = find_merge(encoder, token[i], token[second]);
        if (merge >> 32 != entry >> 32)
            continue;
        token[i] = (int32_t)merge;
        token[second] = -1;
        next[i] = next[second];
        if (next[i] < size)
            previous[next[i]] = i;
        for (int side = 0; side < 2; side++) {
            int32_t from = side ? i : previous[i];
            if (from < 0 || next[from] == size)
                continue;
            merge = find_merge(encoder, token[from], token[next[from]]);
            if (merge != NO_MERGE)
                heap_push(heap, &heap_size, merge >> 32 << 32 | (uint32_t)from);
        }
    }
    for (int64_t i = 0; i < size; i = next[i])
        token[left++] = token[i];
    free(next), free(previous), free(heap);
    return left;
}

/* ---- encoding */

/* Merge a word; out has room for a token per byte. Return the number of tokens, -1 without memory. */
static int64_t merge_word(const Encoder *encoder, const uint8_t *word, int64_t size, const uint8_t *end, int32_t *out)
{
    uint64_t key[2];
    const Word *whole = NULL;
    if (encoder->whole.num_words) {
        key_of(word, size, end, key);
        whole = find_word(&encoder->whole, key, word, size);
    }
    if (whole) {
        *out = *(const int32_t *)value_of(whole);
        return 1;
    }
    return size <= SHORT_WORD ? merge_short(encoder, word, size, out) : merge_long(encoder, word, size, out);
}

static int64_t encode_new_word(Encoder *encoder, const uint64_t key[2], const uint8_t *word, int64_t size,
                               const uint8_t *end, int32_t *out)
{
    Table *known = &encoder->known;
    int64_t count = merge_word(encoder, word, size, end, out), bytes = (1 + count) * sizeof *out;
    if (count < 0)
        return -1;
    if (known->num_words == MOST_WORDS || known->size + bytes_with(size, bytes) > MOST_BYTES)
        clear(known);
    Word *added = add_word(known, key, word, size, bytes);
    if (!added)
        return -1;
    int32_t *tokens = value_of(added);
    *tokens = (int32_t)count;
    memcpy(tokens + 1, out, count * sizeof *out);
    return count;
}

/* Write the tokens of a word to out. Return their number, -1 without memory. */
static inline int64_t encode_word(Encoder *encoder, const uint8_t *word, int64_t size, const uint8_t *end, int32_t *out)
{
    if (size > LONGEST_REMEMBERED)
        return merge_word(encoder, word, size, end, out);
    uint64_t key[2];
    key_of(word, size, end, key);
    const Word *known = find_word(&encoder->known, key, word, size);
    if (!known)
        return encode_new_word(encoder, key, word, size, end, out);
    const int32_t *tokens = value_of(known);
    int64_t count = *tokens++;
    if (count == 1)
        *out = *tokens;
    else
        memcpy(out, tokens, count * sizeof *out);
    return count;
}

void lmkit_encoder_free(Encoder *encoder)
{
    if (!encoder)
        return;
    free(encoder->merges);
    free_table(&encoder->whole);
    free_table(&encoder->known);
    free(encoder);
}

/* Fill the table of words that are one token; -1 without memory. */
static int take_whole_words(Table *whole, const uint8_t *words, int64_t num_bytes, const int64_t *sizes,
                            const int64_t *ids, int64_t number)
{
    const uint8_t *end = words + num_bytes;
    if (number && resize(whole, FIRST_CAPACITY))
        return -1;
    for (int64_t i = 0; i < number; words += sizes[i++]) {
        uint64_t key[2];
        key_of(words, sizes[i], end, key);
        Word *added = add_word(whole, key, words, sizes[i], sizeof(int32_t));
        if (!added)
            return -1;
        *(int32_t *)value_of(added) = (int32_t)ids[i];
    }
    return 0;
}

/* Return a new encoder, NULL without memory. `classes` is borrowed: it must outlive the encoder. The words that are
 * one token are distinct; their bytes are joined. */
Encoder *lmkit_encoder_new(const uint8_t *classes, const int32_t *byte_ids, const int32_t *left, const int32_t *right,
                           const int32_t *merged, int64_t num_merges, int pattern, const uint8_t *whole_words,
                           int64_t whole_bytes, const int64_t *whole_sizes, const int64_t *whole_ids, int64_t num_whole)
{
    uint64_t capacity = 16;
    while (capacity < 4 * (uint64_t)num_merges)
        capacity *= 2;
    Encoder *encoder = calloc(1, sizeof(Encoder));
    if (!encoder)
        return NULL;
    encoder->classes = classes;
    encoder->pattern = pattern;
    memcpy(encoder->byte_ids, byte_ids, sizeof encoder->byte_ids);
    encoder->merges_mask = capacity - 1;
    encoder->merges = malloc(capacity * sizeof(Merge));
    /* Reserve MOST_BYTES at once: unused pages cost nothing, and no words are copied later. */
    if (!encoder->merges || resize(&encoder->known, FIRST_CAPACITY) || extend(&encoder->known, MOST_BYTES)
        || take_whole_words(&encoder->whole, whole_words, whole_bytes, whole_sizes, whole_ids, num_whole)) {
        lmkit_encoder_free(encoder);
        return NULL;
    }
    for (uint64_t i = 0; i < capacity; i++)
        encoder->merges[i] = (Merge){0, NO_MERGE};
    for (int64_t i = 0; i < num_merges; i++) {
        Merge *slot = merge_slot(encoder, pair_of(left[i], right[i]));
        if (!slot->pair)                        /* a pair that is listed twice keeps its first rank */
            *slot = (Merge){pair_of(left[i], right[i]), (uint64_t)i << 32 | (uint32_t)merged[i]};
    }
    return encoder;
}

/* Write the tokens of a text without special tokens to out. Return where they end, NULL without memory. */
NEVER_INLINE int32_t *encode_text(Encoder *encoder, const uint8_t *p, const uint8_t *stop, const uint8_t *end,
                                  int32_t *out)
{
    for (const uint8_t *after; p < stop; p = after) {
        after = encoder->pattern == GPT2 ? word_end(encoder->classes, p, stop)
                : encoder->pattern == DIGITS ? word_end_digits(encoder->classes, p, stop)
                : word_end_llama(encoder->classes, p, stop, encoder->pattern == LLAMA3 ? 3 : 1);
        int64_t count = encode_word(encoder, p, after - p, end, out);
        if (count < 0)
            return NULL;
        out += count;
    }
    return out;
}

/* Encode `size` bytes of valid UTF-8; out has room for as many ids, and places for as many indices: those of the
 * special tokens among the ids. Return the number of ids, -1 without memory. */
int64_t lmkit_encode(Encoder *encoder, const uint8_t *data, int64_t size, const uint8_t *packed_specials, int32_t *out,
                     int32_t *places, int64_t *num_places)
{
    const uint8_t *classes = encoder->classes, *end = data + size;
    int32_t *const begin = out, *const first_place = places;
    const Specials specials = specials_from(packed_specials);
    Span span, text;
    for (Spans spans = {&specials.first, data, data, end}; next_span(&spans, classes, &span);) {
        for (Spans rest = {&specials.second, span.begin, span.begin, span.end}; next_span(&rest, classes, &text);) {
            if (!(out = encode_text(encoder, text.begin, text.end, end, out)))
                return -1;
            if (text.id >= 0) {
                *places++ = (int32_t)(out - begin);
                *out++ = text.id;
            }
        }
        if (span.id >= 0) {
            *places++ = (int32_t)(out - begin);
            *out++ = span.id;
        }
    }
    *num_places = places - first_place;
    return out - begin;
}

/* ---- counting */

typedef struct {
    const uint8_t *classes;                     /* of every code point; borrowed */
    Table known;
    int64_t num_special;
} Counter;

/* Add to the count of a word; -1 without memory. */
static inline int count_word(Counter *counter, const uint64_t key[2], const uint8_t *word, int64_t size, int64_t count)
{
    Word *known = find_word(&counter->known, key, word, size);
    if (known) {
        *(int64_t *)value_of(known) += count;
        return 0;
    }
    if (!(known = add_word(&counter->known, key, word, size, sizeof count)))
        return -1;
    *(int64_t *)value_of(known) = count;
    return 0;
}

void lmkit_counter_free(Counter *counter)
{
    if (!counter)
        return;
    free_table(&counter->known);
    free(counter);
}

/* Return a new counter, NULL without memory. `classes` is borrowed: it must outlive the counter. */
Counter *lmkit_counter_new(const uint8_t *classes)
{
    Counter *counter = calloc(1, sizeof(Counter));
    if (!counter || resize(&counter->known, FIRST_CAPACITY)) {
        free(counter);
        return NULL;
    }
    counter->classes = classes;
    return counter;
}

/* Count the words of a text without special tokens; -1 without memory. */
NEVER_INLINE int count_text(Counter *counter, const uint8_t *p, const uint8_t *stop, const uint8_t *end)
{
    for (const uint8_t *after; p < stop; p = after) {
        after = word_end(counter->classes, p, stop);
        uint64_t key[2];
        key_of(p, after - p, end, key);
        if (count_word(counter, key, p, after - p, 1))
            return -1;
    }
    return 0;
}

/* Count the words in `size` bytes of valid UTF-8, with special tokens to find first; -1 without memory. */
int lmkit_count(Counter *counter, const uint8_t *data, int64_t size, const uint8_t *packed_specials)
{
    const uint8_t *end = data + size;
    const Specials specials = specials_from(packed_specials);
    Span span;
    for (Spans spans = {&specials.first, data, data, end}; next_span(&spans, counter->classes, &span);) {
        if (count_text(counter, span.begin, span.end, end))
            return -1;
        counter->num_special += span.id >= 0;
    }
    return 0;
}

/* first_word and next_word iterate over the words of a counter's table; NULL ends. */
static const Word *first_word(const Table *table)
{
    return table->num_words ? (const Word *)table->words : NULL;
}

static const Word *next_word(const Table *table, const Word *word)
{
    const uint8_t *next = (const uint8_t *)word + bytes_with(word_size(word), sizeof(int64_t));
    return next < table->words + table->size ? (const Word *)next : NULL;
}

/* Add the counts of another counter; -1 without memory. */
int lmkit_count_together(Counter *counter, const Counter *other)
{
    const Table *words = &other->known;
    for (const Word *word = first_word(words); word; word = next_word(words, word))
        if (count_word(counter, word->key, word_text(word), word_size(word), *(int64_t *)value_of(word)))
            return -1;
    counter->num_special += other->num_special;
    return 0;
}

/* Set `sizes` to the number of distinct words, of their bytes, and of special tokens. */
void lmkit_counter_sizes(const Counter *counter, int64_t sizes[3])
{
    const Table *words = &counter->known;
    sizes[0] = words->num_words;
    sizes[1] = 0;
    for (const Word *word = first_word(words); word; word = next_word(words, word))
        sizes[1] += word_size(word);
    sizes[2] = counter->num_special;
}

/* Write all words, joined, to text, and the size and count of each, in the order of their first appearance. */
void lmkit_counter_words(const Counter *counter, uint8_t *text, int64_t *sizes, int64_t *counts)
{
    const Table *words = &counter->known;
    for (const Word *word = first_word(words); word; word = next_word(words, word)) {
        *sizes = word_size(word);
        *counts++ = *(int64_t *)value_of(word);
        memcpy(text, word_text(word), *sizes);
        text += *sizes++;
    }
}

/* ---- hashes of documents and of 13-grams, see data/overlap.py */

enum { NGRAM = 13, END = 0xFF };                /* words; the byte that ends a document */
static const uint64_t FIRST = 0xCBF29CE484222325, PRIME = 0x100000001B3;    /* FNV-1a */
static const uint64_t FACTOR = 0xD6E8FEB86659FD95;

/* What of a text goes on with its next bytes. All are integers of 64 bits: Python allocates an array of them. */
typedef struct {
    uint64_t document, num_runs;                /* of the open document: its hash, and its runs without white space */
    uint64_t run, in_run, word, in_word;        /* hash of the open run and word, and whether one is open */
    uint64_t words[NGRAM], num_words, sum;      /* the last words of the document, and their polynomial */
    uint64_t num_ended;                         /* documents */
} TextHash;

/* The finalizer of SplitMix64 (Steele et al. 2014). */
static inline uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

/* Hash `size` bytes more; write the hashes of the documents that end in them, and of the 13-grams that `modulus`, a power
 * of two, divides, with the numbers of their documents. There is room for `size` of each. */
void lmkit_hash_text(TextHash *open, const uint8_t *data, int64_t size, uint64_t modulus, uint64_t *documents,
                     uint64_t *ngrams, int64_t *numbers, int64_t counts[2])
{
    TextHash text = *open;
    uint64_t last = 1;                          /* factor of the word that leaves */
    for (int i = 0; i < NGRAM; i++)
        last *= FACTOR;
    counts[0] = counts[1] = 0;
    for (const uint8_t *p = data; p < data + size; p++) {
        const uint8_t byte = *p;
        const uint8_t letter = (uint8_t)((byte | 0x20) - 'a') < 26 ? byte | 0x20
                               : (uint8_t)(byte - '0') < 10 || (byte >= 0x80 && byte != END) ? byte : 0;
        if (text.in_word && (!letter || (byte >= 0xE3 && byte <= 0xE9))) {      /* Chinese characters, kana: words */
            const uint64_t word = mixed(text.word);
            uint64_t *place = &text.words[text.num_words++ % NGRAM];
            text.sum = text.sum * FACTOR + word - *place * last;
            *place = word;
            text.in_word = 0;
            const uint64_t ngram = mixed(text.sum);
            if (text.num_words >= NGRAM && !(ngram & (modulus - 1))) {
                numbers[counts[1]] = (int64_t)text.num_ended;
                ngrams[counts[1]++] = ngram;
            }
        }
        if (letter) {
            text.word = ((text.in_word ? text.word : FIRST) ^ letter) * PRIME;
            text.in_word = 1;
        }
        if (byte != ' ' && (uint8_t)(byte - '\t') >= 5 && byte != END) {
            text.run = ((text.in_run ? text.run : FIRST) ^ byte) * PRIME;
            text.in_run = 1;
            continue;
        }
        if (text.in_run) {
            text.document = (text.document ^ mixed(text.run)) * FACTOR;
            text.num_runs++;
            text.in_run = 0;
        }
        if (byte == END) {
            if (text.num_runs)
                documents[counts[0]++] = mixed(text.document);
            text = (TextHash){.num_ended = text.num_ended + 1};
        }
    }
    *open = text;
}
