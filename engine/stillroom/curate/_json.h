/* Going over JSON in UTF-8 without making anything of it.
 *
 * Every function takes the place to read from and the end of the line, reads nothing at or behind
 * the end, and returns the place behind what it has gone over, or NULL if that is not what it
 * should be. Nothing is let pass that RFC 8259 forbids, half of a surrogate pair included.
 */
#ifndef STILLROOM_JSON_H
#define STILLROOM_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Deeper values are left to Python, which tells how deep it can go itself. */
#define MAX_DEPTH 64

typedef const unsigned char *Place;

typedef struct {
    Place start, end;
} Span;

static Place skip_blanks(Place at, Place end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n'))
        at++;
    return at;
}

/* Returns the first place that holds `"`, `\`, a control character or no ASCII, or the end. */
static Place skip_plain(Place at, Place end)
{
#if defined(__SSE2__)
    const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\'), last_control = _mm_set1_epi8(0x1f);
    for (; end - at >= 16; at += 16) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)at);
        const __m128i is_control = _mm_cmpeq_epi8(_mm_min_epu8(bytes, last_control), bytes);
        const __m128i is_mark = _mm_or_si128(_mm_cmpeq_epi8(bytes, quote), _mm_cmpeq_epi8(bytes, backslash));
        /* movemask takes the highest bit of each byte: with the bytes themselves, those of no ASCII. */
        const int found = _mm_movemask_epi8(_mm_or_si128(_mm_or_si128(is_control, is_mark), bytes));
        if (found)
            return at + __builtin_ctz((unsigned)found);
    }
#else
    const uint64_t ones = 0x0101010101010101u, highs = 0x8080808080808080u;
    for (; end - at >= 8; at += 8) {
        uint64_t bytes;
        memcpy(&bytes, at, sizeof bytes);
        const uint64_t quote = bytes ^ ones * '"', backslash = bytes ^ ones * '\\';
        /* Subtracting sets the highest bit of a byte that was less; bytes beyond it may be wrong. */
        if (((quote - ones) | (backslash - ones) | (bytes - ones * 0x20) | bytes) & highs)
            break;
    }
#endif
    while (at < end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\')
        at++;
    return at;
}

/* One more than the value of a hexadecimal digit; 0 of what is none. */
static const unsigned char HEX[256] = {
    ['0'] = 1,  ['1'] = 2,  ['2'] = 3,  ['3'] = 4,  ['4'] = 5,  ['5'] = 6,  ['6'] = 7,  ['7'] = 8,
    ['8'] = 9,  ['9'] = 10, ['a'] = 11, ['b'] = 12, ['c'] = 13, ['d'] = 14, ['e'] = 15, ['f'] = 16,
    ['A'] = 11, ['B'] = 12, ['C'] = 13, ['D'] = 14, ['E'] = 15, ['F'] = 16,
};

/* Returns the value of four hexadecimal digits, -1 of anything else. */
static int hex4(Place at, Place end)
{
    int value = 0;
    if (end - at < 4 || !HEX[at[0]] || !HEX[at[1]] || !HEX[at[2]] || !HEX[at[3]])
        return -1;
    for (int i = 0; i < 4; i++)
        value = value << 4 | (HEX[at[i]] - 1);
    return value;
}

static Place skip_escape(Place at, Place end)
{
    if (end - at < 2)
        return NULL;
    switch (at[1]) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
        return at + 2;
    case 'u':
        break;
    default:
        return NULL;
    }
    const int unit = hex4(at + 2, end);
    if (unit < 0 || (unit >= 0xDC00 && unit <= 0xDFFF))
        return NULL;
    at += 6;
    if (unit < 0xD800 || unit > 0xDBFF)
        return at;
    /* The first half of a pair: the second one follows. */
    if (end - at < 6 || at[0] != '\\' || at[1] != 'u')
        return NULL;
    const int second = hex4(at + 2, end);
    return second >= 0xDC00 && second <= 0xDFFF ? at + 6 : NULL;
}

static bool is_tail(unsigned char byte)
{
    return (byte & 0xC0) == 0x80;
}

/* Skips one character of two to four bytes. Source: Unicode 16, table 3-7. */
static Place skip_wide(Place at, Place end)
{
    const unsigned char first = *at;
    if (first >= 0xE0 && first <= 0xEF) {
        const unsigned char low = first == 0xE0 ? 0xA0 : 0x80, high = first == 0xED ? 0x9F : 0xBF;
        if (end - at < 3 || at[1] < low || at[1] > high)
            return NULL;
        return is_tail(at[2]) ? at + 3 : NULL;
    }
    if (first >= 0xC2 && first <= 0xDF)
        return end - at >= 2 && is_tail(at[1]) ? at + 2 : NULL;
    if (first >= 0xF0 && first <= 0xF4) {
        const unsigned char low = first == 0xF0 ? 0x90 : 0x80, high = first == 0xF4 ? 0x8F : 0xBF;
        if (end - at < 4 || at[1] < low || at[1] > high)
            return NULL;
        return is_tail(at[2]) && is_tail(at[3]) ? at + 4 : NULL;
    }
    return NULL;
}

static Place skip_string(Place at, Place end)
{
    if (at >= end || *at != '"')
        return NULL;
    at++;
    while (at != NULL && (at = skip_plain(at, end)) != end) {
        if (*at == '"')
            return at + 1;
        if (*at != '\\' && *at < 0x80)
            return NULL;
        /* Escapes, and characters of several bytes, seldom come alone. */
        while (at != NULL && at < end && *at == '\\')
            at = skip_escape(at, end);
        while (at != NULL && at < end && *at >= 0x80)
            at = skip_wide(at, end);
    }
    return NULL;
}

static Place skip_digits(Place at, Place end)
{
    const Place start = at;
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at > start ? at : NULL;
}

static Place skip_number(Place at, Place end)
{
    if (at < end && *at == '-')
        at++;
    const bool is_zero = at < end && *at == '0';
    at = is_zero ? at + 1 : skip_digits(at, end);
    if (at != NULL && at < end && *at == '.')
        at = skip_digits(at + 1, end);
    if (at != NULL && at < end && (*at == 'e' || *at == 'E')) {
        at++;
        if (at < end && (*at == '+' || *at == '-'))
            at++;
        at = skip_digits(at, end);
    }
    return at;
}

static Place skip_word(Place at, Place end, const char *word)
{
    const ptrdiff_t size = (ptrdiff_t)strlen(word);
    return end - at >= size && memcmp(at, word, (size_t)size) == 0 ? at + size : NULL;
}

/* Skips `"name":` and the blanks around it. A name with an escape could be any: NULL. */
static Place skip_name(Place at, Place end, Span *name)
{
    at = skip_blanks(at, end);
    name->start = at;
    at = skip_string(at, end);
    if (at == NULL)
        return NULL;
    name->end = at;
    if (memchr(name->start, '\\', (size_t)(name->end - name->start)) != NULL)
        return NULL;
    at = skip_blanks(at, end);
    return at < end && *at == ':' ? skip_blanks(at + 1, end) : NULL;
}

/* Skips the `,` before the next item, or the bracket that closes after the last one. */
static Place skip_to_next(Place at, Place end, unsigned char closing, bool *is_last)
{
    at = skip_blanks(at, end);
    if (at >= end)
        return NULL;
    *is_last = *at == closing;
    return *is_last || *at == ',' ? at + 1 : NULL;
}

/* Skips an opening bracket; `is_empty` tells that the closing one follows, which is skipped too. */
static Place skip_opening(Place at, Place end, unsigned char opening, unsigned char closing, bool *is_empty)
{
    if (at >= end || *at != opening)
        return NULL;
    at = skip_blanks(at + 1, end);
    *is_empty = at < end && *at == closing;
    return *is_empty ? at + 1 : at;
}

static Place skip_value(Place at, Place end, int depth);

static Place skip_object(Place at, Place end, int depth)
{
    bool is_last;
    at = skip_opening(at, end, '{', '}', &is_last);
    while (at != NULL && !is_last) {
        Span name;
        at = skip_name(at, end, &name);
        if (at != NULL)
            at = skip_value(at, end, depth);
        if (at != NULL)
            at = skip_to_next(at, end, '}', &is_last);
    }
    return at;
}

static Place skip_array(Place at, Place end, int depth)
{
    bool is_last;
    at = skip_opening(at, end, '[', ']', &is_last);
    while (at != NULL && !is_last) {
        at = skip_value(skip_blanks(at, end), end, depth);
        if (at != NULL)
            at = skip_to_next(at, end, ']', &is_last);
    }
    return at;
}

static Place skip_value(Place at, Place end, int depth)
{
    if (at >= end)
        return NULL;
    switch (*at) {
    case '"':
        return skip_string(at, end);
    case '{':
        return depth < MAX_DEPTH ? skip_object(at, end, depth + 1) : NULL;
    case '[':
        return depth < MAX_DEPTH ? skip_array(at, end, depth + 1) : NULL;
    case 't':
        return skip_word(at, end, "true");
    case 'f':
        return skip_word(at, end, "false");
    case 'n':
        return skip_word(at, end, "null");
    default:
        return skip_number(at, end);
    }
}

#endif
