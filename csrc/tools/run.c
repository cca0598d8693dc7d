/* The smallest program: token ids in, their greedy continuation out.
 *
 *     deltallama-run MODEL [-n N] [-t THREADS] [--ctx N] [--memory] ID ID ...     (without ids: from standard input)
 *
 * Prints one id per line until a stop token or N ids. --memory adds what the library planned to allocate and by how much the
 * anonymous resident memory of this process grew from before opening to after generating (Linux). */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deltallama.h"

static const char* const usage = "usage: deltallama-run MODEL [-n N] [-t THREADS] [--ctx N] [--memory] ID ID ...\n";

struct tokens {
    int32_t* ids;
    size_t n, capacity;
};

static int fail(const char* what, const char* why) {
    fprintf(stderr, "deltallama-run: %s: %s\n", what, why);
    return 0;
}

/* A whole number in min..max. */
static int parse(const char* text, long min, long max, long* value) {
    char* end;
    errno = 0;
    *value = strtol(text, &end, 10);
    if (end == text || *end != '\0') {
        return fail(text, "not a whole number");
    }
    if (errno == ERANGE || *value < min || *value > max) {
        return fail(text, "out of range");
    }
    return 1;
}

static int push(struct tokens* list, const char* text) {
    long id;
    if (!parse(text, 0, INT32_MAX, &id)) {
        return 0;
    }
    if (list->n == list->capacity) {
        const size_t capacity = list->capacity == 0 ? 64 : 2 * list->capacity;
        int32_t* ids = realloc(list->ids, capacity * sizeof *ids);
        if (ids == NULL) {
            return fail("token ids", "out of memory");
        }
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->n++] = (int32_t)id;
    return 1;
}

static int read_ids(struct tokens* list) {
    char word[32];
    int n;
    while ((n = scanf("%31s", word)) == 1) {
        if (!push(list, word)) {
            return 0;
        }
    }
    return ferror(stdin) ? fail("standard input", "cannot be read") : 1;
}

/* Anonymous resident bytes of this process; 0 if the system does not say. */
static unsigned long long anonymous_bytes(void) {
    FILE* status = fopen("/proc/self/status", "r");
    char line[256];
    unsigned long long kib = 0;
    if (status == NULL) {
        return 0;
    }
    while (fgets(line, sizeof line, status) != NULL && sscanf(line, "RssAnon: %llu", &kib) != 1) {
    }
    fclose(status);
    return kib * 1024;
}

static int check(delta_status status, const char* what) {
    if (status == DELTA_OK) {
        return 1;
    }
    fprintf(stderr, "deltallama-run: %s: %s: %s\n", what, delta_status_name(status), delta_last_error());
    return 0;
}

static int generate(delta_model* model, const struct tokens* prompt, long n) {
    delta_session* session = NULL;
    delta_sampling_params greedy;
    int ok;
    delta_sampling_params_init(&greedy);
    greedy.temperature = 0;
    ok = check(delta_session_create(model, &session), "session") &&
         check(delta_session_sync(session, prompt->ids, prompt->n, NULL, NULL, NULL), "prompt");
    while (ok && n-- > 0) {
        int32_t token = 0;
        ok = check(delta_session_sample(session, &greedy, &token), "sampling");
        if (!ok || delta_model_is_stop(model, token)) {
            break;
        }
        printf("%ld\n", (long)token);
        fflush(stdout);
        if (n > 0) {
            ok = check(delta_session_eval(session, &token, 1, DELTA_LOGITS_LAST), "generation");
        }
    }
    return check(delta_session_free(session), "session") && ok;
}

int main(int argc, char** argv) {
    const char* path = NULL;
    long n = 16, threads = 0, ctx = 0;
    int memory = 0, ok = 1, i;
    struct tokens prompt = {NULL, 0, 0};
    delta_model_params params;
    delta_model_info info;
    delta_memory plan;
    delta_model* model = NULL;

    for (i = 1; i < argc && ok; ++i) {
        long* option = strcmp(argv[i], "-n") == 0      ? &n
                       : strcmp(argv[i], "-t") == 0    ? &threads
                       : strcmp(argv[i], "--ctx") == 0 ? &ctx
                                                       : NULL;
        if (option != NULL) {
            ok = i + 1 < argc ? parse(argv[i + 1], 0, INT32_MAX, option) : fail(argv[i], "needs a number");
            ++i;
        } else if (strcmp(argv[i], "--memory") == 0) {
            memory = 1;
        } else if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) {
            fputs(usage, stdout);
            return 0;
        } else if (argv[i][0] == '-') {
            ok = fail(argv[i], "unknown option");
        } else if (path == NULL) {
            path = argv[i];
        } else {
            ok = push(&prompt, argv[i]);
        }
    }
    if (ok && path == NULL) {
        fputs(usage, stderr);
        ok = 0;
    }
    if (ok && prompt.n == 0) {
        ok = read_ids(&prompt);
    }

    if (ok) {
        delta_model_params_init(&params);
        params.n_threads = (uint32_t)threads;
        params.n_ctx = (uint32_t)ctx;
        info.size = sizeof info;
        plan.size = sizeof plan;
        ok = check(delta_model_plan(path, &params, &info, &plan), path);
    }
    if (ok) {
        const unsigned long long before = anonymous_bytes();
        ok = check(delta_model_open(path, &params, &model), path) && generate(model, &prompt, n);
        if (ok && memory) {
            printf("planned_private_bytes %llu\n", (unsigned long long)plan.total_private);
            printf("measured_growth_bytes %lld\n", (long long)(anonymous_bytes() - before));
        }
        ok = check(delta_model_close(model), "closing") && ok;
    }
    free(prompt.ids);
    return ok ? 0 : 1;
}
