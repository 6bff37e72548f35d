// Runs a compiled kernel: buffers between guards, fibres for threads, trial after trial.
//
//     runner kernel.so        reads plan.txt and inputs.bin; writes outputs.bin and report.txt
//
// Only one thread runs at a time. Blocks and threads run in another order in each trial, so that a
// missing barrier shows.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

struct uint3 { unsigned x, y, z; };
struct value { int kind; void *pointer; long long integer; double real; };
typedef void (*entry_t)(const value *, int);

extern "C" {
uint3 threadIdx, blockIdx, blockDim, gridDim;
unsigned char ludus_dynamic[232448 + 256] __attribute__((aligned(1024)));
}

static const size_t PAGE = 4096, GUARD = 4096, STACK = 256 << 10;
static const int MAX_THREADS = 1024, WARP = 32;
static const unsigned char CANARY = 0xFF;

struct buffer { char name[64]; int role; size_t bytes; unsigned char *data, *base; size_t all; };
struct launch { uint3 grid, block; size_t shared; int count; value values[64]; entry_t entry; };
static buffer *buffers;
static launch *launches;
static int num_buffers, num_launches, num_trials, in_kernel, trial_now, launch_now;

static void report(const char *kind, const char *format, ...) {
    char text[700];
    int length = snprintf(text, sizeof text, "%s\t%d\t%d\t", kind, trial_now, launch_now);
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(text + length, sizeof text - length, format, arguments);
    va_end(arguments);
    int fd = open("report.txt", O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd >= 0 && write(fd, text, length < 700 ? length : 699) >= 0) close(fd);
}
static uint64_t random_state, guard_seed;
// Each guard has bytes of its own: a copy of one buffer's guard onto another's shows.
static unsigned char guard(int buffer, size_t place) {
    return (unsigned char)(((place + 7919ull * buffer) * 0x9E3779B97F4A7C15ull ^ guard_seed) >> 40);
}
static void end(const char *kind, const char *text) {
    report(kind, "%s", text);
    _exit(3);
}

// Fibres

enum { READY, BLOCK, LANES, DONE };
struct fibre {
    void *sp;
    uint3 index;
    int state, line, predicate, result;
    unsigned mask, present;
    unsigned long long given, got[32];
};
static fibre fibres[MAX_THREADS];
static unsigned char *stacks;
static int num_threads, current, order[MAX_THREADS];
static entry_t entry_now;
static const launch *launch_of;
static void *scheduler_sp;

static void run_fibre() {
    entry_now(launch_of->values, launch_of->count);
}

#if defined(__x86_64__)
extern "C" void ludus_switch(void **from, void *to);
__asm__(
    ".text\n.globl ludus_switch\n.type ludus_switch,@function\nludus_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
static void leave() { ludus_switch(&fibres[current].sp, scheduler_sp); }
static void main_of_fibre() {
    run_fibre();
    fibres[current].state = DONE;
    leave();
    abort();
}
static void make(int i) {
    void **top = (void **)(stacks + (size_t)(i + 1) * STACK - 64);
    *--top = 0;
    *--top = (void *)main_of_fibre;
    for (int k = 0; k < 6; k++) *--top = 0;
    fibres[i].sp = top;
}
static void enter(int i) { ludus_switch(&scheduler_sp, fibres[i].sp); }
#else
static ucontext_t contexts[MAX_THREADS], scheduler_context;
static void leave() { swapcontext(&contexts[current], &scheduler_context); }
static void main_of_fibre() {
    run_fibre();
    fibres[current].state = DONE;
    leave();
    abort();
}
static void make(int i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks + (size_t)i * STACK + PAGE;
    contexts[i].uc_stack.ss_size = STACK - PAGE;
    contexts[i].uc_link = 0;
    makecontext(&contexts[i], main_of_fibre, 0);
}
static void enter(int i) { swapcontext(&scheduler_context, &contexts[i]); }
#endif

extern "C" __attribute__((noreturn)) void ludus_fail(const char *text, int line) {
    char said[200];
    bool launch = !strncmp(text, "argument", 8);
    if (launch) snprintf(said, sizeof said, "%s", text);
    else snprintf(said, sizeof said, "line %d: %s", line, text);
    end(launch ? "launch" : "crash", said);
    abort();
}
extern "C" int ludus_lane(void) { return current % WARP; }
extern "C" int ludus_barrier(int line, int predicate, int kind) {
    fibre &own = fibres[current];
    own.state = BLOCK, own.line = line, own.predicate = predicate;
    leave();
    int total = own.result, all = own.present;
    return kind == 1 ? total : kind == 2 ? total == all : kind == 3 ? total > 0 : 0;
}
extern "C" unsigned long long ludus_exchange(
    unsigned mask, unsigned long long value, int source, int line, unsigned long long *all,
    unsigned *present) {
    fibre &own = fibres[current];
    if (!(mask >> current % WARP & 1)) ludus_fail("a lane is not in the mask that it gives", line);
    own.state = LANES, own.line = line, own.mask = mask, own.given = value;
    leave();
    if (all) memcpy(all, own.got, sizeof own.got), *present = own.present;
    if (source < 0) return 0;
    return own.present >> (source & 31) & 1 ? own.got[source & 31] : ~0ull;
}

static bool release_lanes(int first) {
    bool any = false;
    int last = first + WARP < num_threads ? first + WARP : num_threads;
    for (int i = first; i < last; i++) {
        fibre &own = fibres[i];
        if (own.state != LANES) continue;
        unsigned present = 0;
        bool ready = true;
        for (int k = first; k < last && ready; k++) {
            if (!(own.mask >> (k - first) & 1) || fibres[k].state == DONE) continue;
            ready = fibres[k].state == LANES && fibres[k].mask == own.mask;
            present |= 1u << (k - first);
        }
        if (!ready) continue;
        unsigned long long got[32] = {0};
        for (int k = first; k < last; k++)
            if (present >> (k - first) & 1) got[k - first] = fibres[k].given;
        for (int k = first; k < last; k++)
            if (present >> (k - first) & 1) {
                memcpy(fibres[k].got, got, sizeof got);
                fibres[k].present = present, fibres[k].state = READY;
            }
        any = true;
    }
    return any;
}
static bool release_block() {
    int line = -1, total = 0, count = 0;
    for (int i = 0; i < num_threads; i++) {
        if (fibres[i].state == DONE) continue;
        if (fibres[i].state != BLOCK) return false;
        if (line >= 0 && line != fibres[i].line) {
            char text[160];
            snprintf(text, sizeof text, "line %d: threads of a block wait here for others that wait"
                     " at line %d", line, fibres[i].line);
            end("deadlock", text);
        }
        line = fibres[i].line, total += fibres[i].predicate, count++;
    }
    for (int i = 0; i < num_threads; i++)
        if (fibres[i].state == BLOCK)
            fibres[i].state = READY, fibres[i].result = total, fibres[i].present = count;
    return count > 0;
}
static void run_block() {
    for (int i = 0; i < num_threads; i++) make(i), fibres[i].state = READY;
    int left = num_threads;
    while (left) {
        bool ran = false;
        for (int k = 0; k < num_threads; k++) {
            int i = order[k];
            if (fibres[i].state != READY) continue;
            ran = true, current = i, threadIdx = fibres[i].index;
            enter(i);
            if (fibres[i].state == DONE) left--;
        }
        for (int first = 0; first < num_threads; first += WARP) ran |= release_lanes(first);
        if (!left) break;
        if (!release_block() && !ran) {
            int i = 0;
            while (fibres[i].state != LANES) i++;
            char text[200];
            snprintf(text, sizeof text, "line %d: thread (%u, %u, %u) waits for lanes of its warp "
                     "that never come here", fibres[i].line, fibres[i].index.x, fibres[i].index.y,
                     fibres[i].index.z);
            end("deadlock", text);
        }
    }
}

// Launches

static uint32_t draw() {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(random_state >> 33);
}
static void shuffle(int *list, long n) {
    for (long i = n - 1; i > 0; i--) {
        long k = draw() % (i + 1);
        int kept = list[i];
        list[i] = list[k], list[k] = kept;
    }
}
static void run_launch(const launch &l, bool barriers, unsigned char *shared, size_t shared_bytes) {
    long blocks = (long)l.grid.x * l.grid.y * l.grid.z;
    num_threads = l.block.x * l.block.y * l.block.z;
    gridDim = l.grid, blockDim = l.block, launch_of = &l, entry_now = l.entry;
    for (int i = 0; i < num_threads; i++) {
        uint3 at = {i % l.block.x, i / l.block.x % l.block.y, i / (l.block.x * l.block.y)};
        fibres[i].index = at;
        order[i] = trial_now == 1 ? num_threads - 1 - i : i;
    }
    int *turns = blocks <= 1 << 20 ? (int *)malloc(sizeof(int) * blocks) : 0;
    for (long b = 0; turns && b < blocks; b++) turns[b] = trial_now == 1 ? blocks - 1 - b : b;
    if (trial_now > 1) {
        shuffle(order, num_threads);
        if (turns) shuffle(turns, blocks);
    }
    for (long n = 0; n < blocks; n++) {
        long b = turns ? turns[n] : n;
        uint3 at = {(unsigned)(b % l.grid.x), (unsigned)(b / l.grid.x % l.grid.y),
                    (unsigned)(b / ((long)l.grid.x * l.grid.y))};
        blockIdx = at;
        if (shared_bytes) memset(shared, CANARY, shared_bytes);
        if (l.shared) memset(ludus_dynamic, CANARY, l.shared);
        for (int k = 0; k < 256; k++) ludus_dynamic[l.shared + k] = guard(-1, k);
        if (barriers) {
            run_block();
        } else {
            for (int k = 0; k < num_threads; k++) {
                current = order[k], threadIdx = fibres[order[k]].index;
                l.entry(l.values, l.count);
            }
        }
        for (int k = 0; k < 256; k++)
            if (ludus_dynamic[l.shared + k] != guard(-1, k))
                end("bounds", "dynamic shared memory is written behind its end: "
                              "the launch line gives its bytes");
    }
    free(turns);
}

static void on_signal(int number, siginfo_t *info, void *) {
    if (!in_kernel) _exit(4);
    const char *what = number == SIGFPE ? "an integer division by zero" : "an illegal address";
    uintptr_t at = (uintptr_t)info->si_addr, low = (uintptr_t)stacks;
    if (number == SIGSEGV && stacks && at >= low && at < low + STACK * MAX_THREADS)
        what = "the stack of a thread is too small (256 KB)";
    for (int i = 0; i < num_buffers; i++) {
        uintptr_t base = (uintptr_t)buffers[i].base;
        if (number == SIGSEGV && at >= base && at < base + buffers[i].all)
            report("crash", "thread (%u, %u, %u) of block (%u, %u, %u): out of bounds of `%s`",
                   threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z,
                   buffers[i].name), _exit(3);
    }
    report("crash", "thread (%u, %u, %u) of block (%u, %u, %u): %s", threadIdx.x, threadIdx.y,
           threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z, what);
    _exit(3);
}

static void need(bool right) { if (!right) _exit(5); }
static unsigned char *reserve(size_t bytes) {
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    if (at == MAP_FAILED) end("memory", "the buffers do not fit into memory");
    return (unsigned char *)at;
}
static void read_plan() {
    FILE *file = fopen("plan.txt", "r");
    need(file && fscanf(file, "%d %d %d %lu", &num_trials, &num_buffers, &num_launches,
                        &random_state) == 4);
    guard_seed = random_state * 0xD1342543DE82EF95ull;
    buffers = (buffer *)calloc(num_buffers + 1, sizeof(buffer));
    launches = (launch *)calloc(num_launches + 1, sizeof(launch));
    for (int i = 0; i < num_buffers; i++) {
        buffer &b = buffers[i];
        need(fscanf(file, "%63s %d %zu", b.name, &b.role, &b.bytes) == 3);
        size_t inner = (b.bytes + PAGE - 1) / PAGE * PAGE;
        b.all = inner + 2 * GUARD + 2 * PAGE;
        b.base = reserve(b.all);
        mprotect(b.base, PAGE, PROT_NONE);
        mprotect(b.base + b.all - PAGE, PAGE, PROT_NONE);
        b.data = b.base + PAGE + GUARD;
        for (size_t k = PAGE; k < b.all - PAGE; k++) b.base[k] = guard(i, k);
    }
    for (int i = 0; i < num_launches; i++) {
        launch &l = launches[i];
        need(fscanf(file, "%u %u %u %u %u %u %zu %d", &l.grid.x, &l.grid.y, &l.grid.z, &l.block.x,
                    &l.block.y, &l.block.z, &l.shared, &l.count) == 8 && l.count <= 64);
        for (int k = 0; k < l.count; k++) {
            value &v = l.values[k];
            double number;
            need(fscanf(file, "%d", &v.kind) == 1);
            if (v.kind == 2) need(fscanf(file, "%lf", &number) == 1), v.real = number;
            else need(fscanf(file, "%lld", &v.integer) == 1);
            if (v.kind == 0) v.pointer = buffers[v.integer].data;
        }
    }
    fclose(file);
}
static void check_guards() {
    char text[200];
    for (int i = 0; i < num_buffers; i++) {
        const buffer &b = buffers[i];
        const unsigned char *after = b.data + b.bytes, *last = b.base + b.all - PAGE;
        for (const unsigned char *p = b.base + PAGE; p < b.data; p++)
            if (*p != guard(i, p - b.base)) {
                snprintf(text, sizeof text, "`%s` is written %zu bytes before its start", b.name,
                         (size_t)(b.data - p));
                end("bounds", text);
            }
        for (const unsigned char *p = after; p < last; p++)
            if (*p != guard(i, p - b.base)) {
                if (p == after)
                    snprintf(text, sizeof text, "`%s` is written directly after its end", b.name);
                else
                    snprintf(text, sizeof text, "`%s` is written %zu bytes after its end", b.name,
                             (size_t)(p - after));
                end("bounds", text);
            }
    }
}

int main(int, char **given) {
    trial_now = launch_now = 0;
    read_plan();
    void *library = dlopen(given[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) end("link", "its variables do not fit into memory");
    for (int i = 0; i < num_launches; i++) {
        char name[40];
        snprintf(name, sizeof name, "ludus_entry_%d", i);
        launches[i].entry = (entry_t)dlsym(library, name);
        need(launches[i].entry != 0);
    }
    auto area = (void (*)(unsigned char **, size_t *))dlsym(library, "ludus_shared_area");
    unsigned char *shared = 0;
    size_t shared_bytes = 0;
    if (area) area(&shared, &shared_bytes);
    bool barriers = !strcmp(given[2], "1");
    if (barriers) {
        stacks = reserve(STACK * MAX_THREADS);
        for (int i = 0; i < MAX_THREADS; i++) mprotect(stacks + i * STACK, PAGE, PROT_NONE);
    }
    stack_t aside = {};
    aside.ss_size = 64 << 10, aside.ss_sp = reserve(aside.ss_size);
    sigaltstack(&aside, 0);
    struct sigaction action = {};
    action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    const int numbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (int number : numbers) sigaction(number, &action, 0);
    int inputs = open("inputs.bin", O_RDONLY);
    int outputs = open("outputs.bin", O_WRONLY | O_CREAT | O_TRUNC, 0644);
    size_t most = 1;
    for (int i = 0; i < num_buffers; i++) if (buffers[i].bytes > most) most = buffers[i].bytes;
    unsigned char *kept = reserve(most);
    off_t offset = 0;
    for (trial_now = 0; trial_now < num_trials; trial_now++) {
        off_t start = offset;
        for (int i = 0; i < num_buffers; i++) {
            buffer &b = buffers[i];
            if (b.role == 0) {
                need(pread(inputs, b.data, b.bytes, offset) == (ssize_t)b.bytes);
                offset += b.bytes;
            } else {
                memset(b.data, trial_now % 2 ? 0x71 : 0xFF, b.bytes);
            }
        }
        in_kernel = 1;
        for (launch_now = 0; launch_now < num_launches; launch_now++)
            run_launch(launches[launch_now], barriers, shared, shared_bytes);
        in_kernel = 0, launch_now = -1;
        check_guards();
        for (int i = 0; i < num_buffers; i++) {
            buffer &b = buffers[i];
            if (b.role == 0) {
                need(pread(inputs, kept, b.bytes, start) == (ssize_t)b.bytes);
                start += b.bytes;
                if (memcmp(kept, b.data, b.bytes)) end("input", b.name);
            } else if (b.role == 1) {
                size_t done = 0;
                while (done < b.bytes) {
                    ssize_t n = write(outputs, b.data + done, b.bytes - done);
                    need(n > 0);
                    done += n;
                }
            }
        }
    }
    report("done", "%d", num_trials);
    _exit(0);
}
