/* Stands for NVIDIA's driver (libcuda.so.1) on a machine without one. It has as many devices as CUDA_VISIBLE_DEVICES
   names when it is initialised, which is when the real one reads that variable, and of those nothing but their number.
   Each call is a line of the file STUB_CUDA_LOG: process, call, and CUDA_VISIBLE_DEVICES. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 3, NO_DEVICE = 100, NOT_SUPPORTED = 801 };
enum { VERSION = 13000, DEVICES = 4, LAZY = 2, TABLE = 256 };

static int devices = -1; /* before cuInit */

static const char *visible(void) {
    return getenv("CUDA_VISIBLE_DEVICES");
}

static void note(const char *call) {
    const char *path = getenv("STUB_CUDA_LOG"), *names = visible();
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log != NULL) {
        fprintf(log, "%d %s %s\n", (int)getpid(), call, names ? names : "all");
        fclose(log);
    }
}

int cuInit(unsigned flags) {
    note("cuInit");
    const char *names = visible();
    devices = names == NULL ? DEVICES : *names != '\0';
    for (; names != NULL && *names != '\0'; names++)
        devices += *names == ',';
    return devices ? SUCCESS : NO_DEVICE;
}

int cuDriverGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}

int cuModuleGetLoadingMode(int *mode) {
    *mode = LAZY;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    note("cuDeviceGetCount");
    *count = devices;
    return devices < 0 ? NOT_INITIALIZED : SUCCESS;
}

static int nothing(void) {
    return SUCCESS;
}

static int unknown(void) {
    note("other");
    return NOT_SUPPORTED;
}

/* The runtime asks for tables of functions that nobody describes: the size in bytes, then the functions. */
int cuGetExportTable(const void **table, const void *id) {
    static const void *functions[TABLE];
    functions[0] = (void *)sizeof functions;
    for (int i = 1; i < TABLE; i++)
        functions[i] = (void *)nothing;
    *table = functions;
    return SUCCESS;
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuInit", (void *)cuInit},
        {"cuDriverGetVersion", (void *)cuDriverGetVersion},
        {"cuModuleGetLoadingMode", (void *)cuModuleGetLoadingMode},
        {"cuDeviceGetCount", (void *)cuDeviceGetCount},
        {"cuGetExportTable", (void *)cuGetExportTable},
        {"cuGetProcAddress", (void *)cuGetProcAddress_v2},
    };
    *function = (void *)unknown;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(symbol, known[i].name) == 0)
            *function = known[i].function;
    if (status != NULL)
        *status = SUCCESS;
    return SUCCESS;
}
