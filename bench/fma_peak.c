/* The most float32 multiply-adds that threads of this processor do in a second: independent chains in registers, nothing else.
 *
 *     cc -O3 -march=native -pthread fma_peak.c -o fma_peak && ./fma_peak THREADS
 *
 * Prints operations (two for each multiply-add) per second of all threads together. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#if defined(__AVX512F__)
#define LANES 16
#define CHAINS 24 /* of 32 registers */
#else
#define LANES 8
#define CHAINS 12 /* of 16 registers */
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));

static const long steps = 20 * 1000 * 1000;
static volatile float sink;

static void *work(void *unused) {
    (void)unused;
    vec sum[CHAINS];
    vec factor = (vec){0} + 0.999F, term = (vec){0} + 0.001F;
    for (int i = 0; i < CHAINS; ++i) {
        sum[i] = (vec){0} + (float)i;
    }
    for (long step = 0; step < steps; ++step) {
        __asm__ volatile("" : "+x"(factor), "+x"(term)); /* not to be computed in advance */
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; ++i) {
            sum[i] = sum[i] * factor + term; /* one instruction: contraction is on by default */
        }
    }
    for (int i = 0; i < CHAINS; ++i) {
        sink = sum[i][0];
    }
    return NULL;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 1;
    if (n < 1 || n > 1024) {
        fprintf(stderr, "usage: fma_peak THREADS\n");
        return 2;
    }
    pthread_t threads[1024];
    double best = 0;
    for (int repeat = 0; repeat < 5; ++repeat) {
        const double start = seconds();
        for (int i = 0; i < n; ++i) {
            if (pthread_create(&threads[i], NULL, work, NULL) != 0) {
                fprintf(stderr, "fma_peak: no thread %d\n", i);
                return 1;
            }
        }
        for (int i = 0; i < n; ++i) {
            pthread_join(threads[i], NULL);
        }
        const double speed = 2.0 * LANES * CHAINS * (double)steps * n / (seconds() - start);
        best = speed > best ? speed : best;
    }
    printf("%.6g\n", best);
    return 0;
}
