/* Causal and bidirectional attention over packed rows in bf16, for CPUs with AVX-512 BF16 (Zen 4, Sapphire Rapids).
 *
 * FlashAttention-2 (Dao, 2023): a block of queries meets KEYS of its keys at a time, with a running maximum and sum of
 * its softmax; nothing of length x length is kept, and the backward pass makes the weights again from the logarithm of
 * their sum. Products are of bf16 with sums in fp32; the softmax is fp32. A task is a segment of the queries of one row
 * and one head of keys. Tasks depend on the row alone, and sums are in a fixed order: results do not change with the
 * rows beside it, nor with the number of threads.
 *
 * "pairs" are two bf16 in 32 bits, as the products take them: neighbours along the dimension that is summed over. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* TILE rows by 4 vectors of sums fill the registers. Blocks of keys begin and end at multiples of ALIGN, which is one
 * of TILE and of a vector, so that no product writes beside its rows. */
enum { QUERIES = 48, KEYS = 384, TILE = 6, ALIGN = 48, SHORTEST = 240, SEGMENTS = 8, WIDEST = 256 };

typedef uint16_t bf16;

/* (tokens, heads, width) at these strides; the width is dense. */
typedef struct {
    bf16 *data;
    long token, head;
} Tensor;

/* models/cpu_kernels.py has the same fields. */
typedef struct {
    Tensor query, key, value, out, grad_out, grad_query, grad_key, grad_value;
    float *logsumexp;     /* (heads, tokens): logarithms to base 2 of the sums of each softmax */
    const float *sinks; /* (heads), or NULL */
    const long *lengths;
    long rows, tokens, heads, kv_heads, width, window, causal, threads;
    float scale;
} Call;

typedef struct {
    long start, length;   /* of the row */
    long first, last;     /* the segment's queries, in the row */
    long low, high;       /* the keys that they see, from a multiple of ALIGN */
    long head, segment;
    float *grad_key, *grad_value; /* (high - low, width) */
} Task;

static inline long up(long count, long step) { return (count + step - 1) / step * step; }
static inline long lesser(long a, long b) { return a < b ? a : b; }
static inline long greater(long a, long b) { return a > b ? a : b; }

/* The keys that a query sees. */
static inline long lowest(const Call *call, long query) { return greater(0, query - call->window + 1); }
static inline long highest(const Call *call, long query, long length) {
    return call->causal ? query + 1 : lesser(length, query + call->window);
}

/* Memory from the beginning of a cache line on: a vector that lies in two lines is loaded twice. */
static inline void *room(long bytes) { return aligned_alloc(64, up(bytes, 64)); }

/* Of lanes `at` to `at` + 15, those in [low, high). */
static inline __mmask16 lanes(long at, long low, long high) {
    long from = lesser(greater(low - at, 0), 16), to = lesser(greater(high - at, 0), 16);
    return (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1));
}

static inline __m512 widen(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16));
}

static inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

static inline __m512i paired(__m256i low, __m256i high) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

/* 2^x for x <= 0, to 2e-7: Taylor's polynomial for the part in [-1/2, 1/2]. */
static inline __m512 power_of_2(__m512 x) {
    const float factors[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
    /* In this order a NaN stays one: of a number and a NaN, the second operand is taken. */
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 part = _mm512_sub_ps(x, whole), y = _mm512_set1_ps(1.5403530e-4f);
    for (int i = 0; i < 6; i++) y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(factors[i]));
    return _mm512_scalef_ps(y, whole);
}

static inline void store_scaled(const float *from, float by, long width, bf16 *to) {
    for (long d = 0; d < width; d += 16)
        _mm256_storeu_si256((void *)(to + d), narrow(_mm512_mul_ps(_mm512_loadu_ps(from + d), _mm512_set1_ps(by))));
}

static inline bf16 *at(Tensor tensor, long token, long head) { return tensor.data + token * tensor.token + head * tensor.head; }

/* --- products ------------------------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void tile(
    int vectors, long depth, const uint32_t *a, long a_row, long a_pair, const uint32_t *b, long b_pair, float *c,
    long c_row, int adds) {
    __m512 sums[TILE][4];
    for (int m = 0; m < TILE; m++)
        for (int n = 0; n < vectors; n++)
            sums[m][n] = adds ? _mm512_loadu_ps(c + m * c_row + 16 * n) : _mm512_setzero_ps();
    for (long k = 0; k < depth; k++) {
        __m512bh right[4];
        for (int n = 0; n < vectors; n++) right[n] = (__m512bh)_mm512_loadu_si512(b + k * b_pair + 16 * n);
        for (int m = 0; m < TILE; m++) {
            __m512bh left = (__m512bh)_mm512_set1_epi32(a[m * a_row + k * a_pair]);
            for (int n = 0; n < vectors; n++) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], left, right[n]);
        }
    }
    for (int m = 0; m < TILE; m++)
        for (int n = 0; n < vectors; n++) _mm512_storeu_ps(c + m * c_row + 16 * n, sums[m][n]);
}

/* C (M, N) = or += A (M, 2 depth) B (2 depth, N); M is a multiple of TILE, N of 16. */
static void product(
    long M, long N, long depth, const uint32_t *a, long a_row, long a_pair, const uint32_t *b, long b_pair, float *c,
    long c_row, int adds) {
    for (long n = 0; n < N; n += 64)
        for (long m = 0; m < M; m += TILE) {
            const uint32_t *left = a + m * a_row, *right = b + n;
            float *to = c + m * c_row + n;
            switch (N - n) {
                case 16: tile(1, depth, left, a_row, a_pair, right, b_pair, to, c_row, adds); break;
                case 32: tile(2, depth, left, a_row, a_pair, right, b_pair, to, c_row, adds); break;
                case 48: tile(3, depth, left, a_row, a_pair, right, b_pair, to, c_row, adds); break;
                default: tile(4, depth, left, a_row, a_pair, right, b_pair, to, c_row, adds);
            }
        }
}

/* `count` tokens as they are, (padded, width / 2) pairs along the width; padding is zero. */
static void copy_rows(Tensor from, long head, long start, long count, long padded, long width, uint32_t *to) {
    for (long t = 0; t < count; t++) memcpy(to + t * width / 2, at(from, start + t, head), 2 * width);
    memset(to + count * width / 2, 0, 2 * width * (padded - count));
}

/* The same turned, (width / 2, padded). */
static void copy_turned(Tensor from, long head, long start, long count, long padded, long width, uint32_t *to) {
    for (long t = 0; t < padded; t++)
        for (long d = 0; d < width / 2; d++) {
            uint32_t pair = 0;
            if (t < count) memcpy(&pair, at(from, start + t, head) + 2 * d, 4);
            to[d * padded + t] = pair;
        }
}

/* (padded / 2, width) pairs along the tokens. */
static void copy_paired(Tensor from, long head, long start, long count, long padded, long width, uint32_t *to) {
    for (long t = 0; t < padded; t += 2)
        for (long d = 0; d < width; d++) {
            uint32_t low = t < count ? at(from, start + t, head)[d] : 0;
            uint32_t high = t + 1 < count ? at(from, start + t + 1, head)[d] : 0;
            to[t / 2 * width + d] = low | high << 16;
        }
}

/* --- tasks ---------------------------------------------------------------------------------------------------- */

static int dearest_first(const void *a, const void *b) {
    const Task *x = a, *y = b;
    long cost_x = (x->last - x->first) * (x->high - x->low), cost_y = (y->last - y->first) * (y->high - y->low);
    return (cost_x < cost_y) - (cost_x > cost_y);
}

static Task *tasks_of(const Call *call, long *count) {
    *count = call->rows * call->kv_heads * SEGMENTS;
    Task *tasks = malloc(sizeof(Task) * *count), *task = tasks;
    for (long row = 0, start = 0; row < call->rows; start += call->lengths[row++])
        for (long head = 0; head < call->kv_heads; head++) {
            long length = call->lengths[row];
            long size = greater(SHORTEST, up((length + SEGMENTS - 1) / SEGMENTS, QUERIES));
            for (long first = 0; first < length; first += size) {
                long last = lesser(first + size, length), low = lowest(call, first) / ALIGN * ALIGN;
                long high = low + up(highest(call, last - 1, length) - low, ALIGN);
                *task++ = (Task){start, length, first, last, low, high, head, first / size, NULL, NULL};
            }
        }
    *count = task - tasks;
    return tasks;
}

void finray_attention(const Call *call) {
    const long width = call->width, groups = call->heads / call->kv_heads;
    const float to_base_2 = 1.44269504f, scale = call->scale * to_base_2;
    long count;
    Task *tasks = tasks_of(call, &count);
    qsort(tasks, count, sizeof(Task), dearest_first);
#pragma omp parallel num_threads(call->threads)
    {
        uint32_t *asked = room(QUERIES * width * 2), *weights = room(QUERIES * KEYS * 2);
        float *scores = room(QUERIES * KEYS * 4), *sums = room(QUERIES * width * 4);
#pragma omp for schedule(dynamic, 1)
        for (long number = 0; number < count; number++) {
            const Task task = tasks[number];
            const long seen = task.high - task.low, real = lesser(task.high, task.length) - task.low;
            uint32_t *keys = room(seen * width * 2), *values = room(seen * width * 2);
            copy_turned(call->key, task.head, task.start + task.low, real, seen, width, keys);
            copy_paired(call->value, task.head, task.start + task.low, real, seen, width, values);
            for (long head = task.head * groups; head < (task.head + 1) * groups; head++)
                for (long block = task.first; block < task.last; block += QUERIES) {
                    const long size = lesser(task.last - block, QUERIES), padded = up(size, TILE);
                    const long end = highest(call, block + size - 1, task.length);
                    float most[QUERIES], total[QUERIES];
                    for (int i = 0; i < QUERIES; i++) {
                        most[i] = call->sinks ? call->sinks[head] * to_base_2 : -INFINITY;
                        total[i] = call->sinks ? 1 : 0;
                    }
                    copy_rows(call->query, head, task.start + block, size, padded, width, asked);
                    memset(sums, 0, padded * width * 4);
                    for (long from = lowest(call, block) / ALIGN * ALIGN; from < end; from += KEYS) {
                        const long n = up(lesser(end - from, KEYS), ALIGN), skip = from - task.low;
                        product(padded, n, width / 2, asked, width / 2, 1, keys + skip, seen, scores, n, 0);
                        for (long i = 0; i < padded; i++) {
                            const long query = block + lesser(i, size - 1);
                            const long low = lowest(call, query), high = highest(call, query, task.length);
                            float *row = scores + i * n;
                            __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
                            for (long j = 0; j < n; j += 16) {
                                __m512 score = _mm512_mul_ps(_mm512_loadu_ps(row + j), _mm512_set1_ps(scale));
                                _mm512_storeu_ps(row + j, score);
                                top = _mm512_mask_max_ps(top, lanes(from + j, low, high), top, score);
                            }
                            const float now = fmaxf(most[i], _mm512_reduce_max_ps(top));
                            /* A window may begin after these keys: then nothing has been seen yet. */
                            const float less = now == -INFINITY ? 0 : now;
                            const float shrunk = most[i] == -INFINITY ? 0 : exp2f(most[i] - less);
                            for (long j = 0; j < n; j += 16) {
                                __m512 weight = power_of_2(_mm512_sub_ps(_mm512_loadu_ps(row + j), _mm512_set1_ps(less)));
                                weight = _mm512_maskz_mov_ps(lanes(from + j, low, high), weight);
                                sum = _mm512_add_ps(sum, weight);
                                _mm256_storeu_si256((void *)((bf16 *)weights + i * n + j), narrow(weight));
                            }
                            total[i] = total[i] * shrunk + _mm512_reduce_add_ps(sum);
                            most[i] = now;
                            if (shrunk != 1)
                                for (long d = 0; d < width; d++) sums[i * width + d] *= shrunk;
                        }
                        product(padded, width, n / 2, weights, n / 2, 1, values + skip / 2 * width, width, sums, width, 1);
                    }
                    for (long i = 0; i < size; i++) {
                        const long token = task.start + block + i;
                        store_scaled(sums + i * width, 1 / total[i], width, at(call->out, token, head));
                        call->logsumexp[head * call->tokens + token] = most[i] + log2f(total[i]);
                    }
                }
            free(keys), free(values);
        }
        free(asked), free(scores), free(weights), free(sums);
    }
    free(tasks);
}

void finray_attention_backward(const Call *call) {
    const long width = call->width, groups = call->heads / call->kv_heads;
    const float scale = call->scale * 1.44269504f;
    long count;
    Task *tasks = tasks_of(call, &count), *sorted = malloc(sizeof(Task) * count);
    for (long number = 0; number < count; number++) {
        Task *task = tasks + number;
        const long size = (task->high - task->low) * width * 2 * sizeof(float);
        task->grad_key = memset(room(size), 0, size);
        task->grad_value = task->grad_key + (task->high - task->low) * width;
    }
    memcpy(sorted, tasks, sizeof(Task) * count);
    qsort(sorted, count, sizeof(Task), dearest_first);
#pragma omp parallel num_threads(call->threads)
    {
        const long block_pairs = QUERIES * width / 2, score_pairs = QUERIES * KEYS / 2;
        uint32_t *asked = room(block_pairs * 4 * 4), *weights = room(score_pairs * 3 * 4);
        uint32_t *given = asked + block_pairs, *asked_pairs = given + block_pairs, *given_pairs = asked_pairs + block_pairs;
        uint32_t *grad_scores = weights + score_pairs, *grad_scores_pairs = grad_scores + score_pairs;
        float *scores = room(QUERIES * KEYS * 8), *grad_weights = scores + QUERIES * KEYS;
        float *sums = room(QUERIES * width * 4);
#pragma omp for schedule(dynamic, 1)
        for (long number = 0; number < count; number++) {
            const Task task = sorted[number];
            const long seen = task.high - task.low, real = lesser(task.high, task.length) - task.low;
            uint32_t *keys = room(seen * width * 6);
            uint32_t *values = keys + seen * width / 2, *key_pairs = values + seen * width / 2;
            copy_turned(call->key, task.head, task.start + task.low, real, seen, width, keys);
            copy_turned(call->value, task.head, task.start + task.low, real, seen, width, values);
            copy_paired(call->key, task.head, task.start + task.low, real, seen, width, key_pairs);
            for (long head = task.head * groups; head < (task.head + 1) * groups; head++)
                for (long block = task.first; block < task.last; block += QUERIES) {
                    const long size = lesser(task.last - block, QUERIES), padded = up(size, TILE);
                    const long start = task.start + block, end = highest(call, block + size - 1, task.length);
                    float along[QUERIES];
                    copy_rows(call->query, head, start, size, padded, width, asked);
                    copy_rows(call->grad_out, head, start, size, padded, width, given);
                    copy_paired(call->query, head, start, size, padded, width, asked_pairs);
                    copy_paired(call->grad_out, head, start, size, padded, width, given_pairs);
                    memset(sums, 0, padded * width * 4);
                    for (long i = 0; i < size; i++) {
                        const bf16 *gradient = at(call->grad_out, start + i, head), *out = at(call->out, start + i, head);
                        __m512 sum = _mm512_setzero_ps();
                        for (long d = 0; d < width; d += 16) sum = _mm512_fmadd_ps(widen(gradient + d), widen(out + d), sum);
                        along[i] = _mm512_reduce_add_ps(sum);
                    }
                    for (long from = lowest(call, block) / ALIGN * ALIGN; from < end; from += KEYS) {
                        const long n = up(lesser(end - from, KEYS), ALIGN), skip = from - task.low;
                        product(padded, n, width / 2, asked, width / 2, 1, keys + skip, seen, scores, n, 0);
                        product(padded, n, width / 2, given, width / 2, 1, values + skip, seen, grad_weights, n, 0);
                        for (long i = 0; i < padded; i += 2)
                            for (long j = 0; j < n; j += 16) {
                                __m256i weight[2], grad_score[2];
                                for (long r = 0; r < 2; r++) {
                                    /* Rows that fill up a tile see nothing. */
                                    const long query = block + i + r, is_row = i + r < size;
                                    const long high = is_row ? highest(call, query, task.length) : 0;
                                    const float row_logsumexp = is_row ? call->logsumexp[head * call->tokens + start + i + r] : 0;
                                    __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + (i + r) * n + j), _mm512_set1_ps(scale));
                                    x = power_of_2(_mm512_sub_ps(x, _mm512_set1_ps(row_logsumexp)));
                                    x = _mm512_maskz_mov_ps(lanes(from + j, lowest(call, query), high), x);
                                    weight[r] = narrow(x);
                                    __m512 gradient = _mm512_loadu_ps(grad_weights + (i + r) * n + j);
                                    x = _mm512_mul_ps(x, _mm512_sub_ps(gradient, _mm512_set1_ps(is_row ? along[i + r] : 0)));
                                    grad_score[r] = narrow(x);
                                    _mm256_storeu_si256((void *)((bf16 *)grad_scores + (i + r) * n + j), grad_score[r]);
                                }
                                _mm512_storeu_si512(weights + i / 2 * n + j, paired(weight[0], weight[1]));
                                _mm512_storeu_si512(grad_scores_pairs + i / 2 * n + j, paired(grad_score[0], grad_score[1]));
                            }
                        product(padded, width, n / 2, grad_scores, n / 2, 1, key_pairs + skip / 2 * width, width, sums, width, 1);
                        product(n, width, padded / 2, weights, 1, n, given_pairs, width, task.grad_value + skip * width, width, 1);
                        product(n, width, padded / 2, grad_scores_pairs, 1, n, asked_pairs, width, task.grad_key + skip * width, width, 1);
                    }
                    for (long i = 0; i < size; i++)
                        store_scaled(sums + i * width, call->scale, width, at(call->grad_query, start + i, head));
                }
            free(keys);
        }
        free(asked), free(weights), free(scores), free(sums);
        /* The segments of a row are added in their order. */
#pragma omp for schedule(dynamic, 1)
        for (long number = 0; number < count; number++) {
            const Task task = tasks[number];
            if (task.segment > 0) continue;
            for (long t = 0; t < task.length; t++) {
                float grad_key[WIDEST] = {0}, grad_value[WIDEST] = {0};
                for (long other = number; other < count && (other == number || tasks[other].segment > 0); other++) {
                    const Task part = tasks[other];
                    if (t < part.low || t >= part.high) continue;
                    for (long d = 0; d < width; d++) {
                        grad_key[d] += part.grad_key[(t - part.low) * width + d];
                        grad_value[d] += part.grad_value[(t - part.low) * width + d];
                    }
                }
                store_scaled(grad_key, call->scale, width, at(call->grad_key, task.start + t, task.head));
                store_scaled(grad_value, 1, width, at(call->grad_value, task.start + t, task.head));
            }
        }
    }
    for (long number = 0; number < count; number++) free(tasks[number].grad_key);
    free(tasks), free(sorted);
}
