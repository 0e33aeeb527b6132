// Runs a Metal kernel that was compiled as C++: threads, SIMD groups, barriers, memory checks.
//
// Each GPU thread is a fibre. A fibre runs until it must meet others (a SIMD exchange, a barrier)
// and then hands over to the scheduler loop of its threadgroup. In check mode the compiler's
// ThreadSanitizer pass calls us at every load and store; those callbacks are ours, not TSan's.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

extern "C" {
// Where a thread is; the generated entry point turns this into the kernel's attributes.
struct EmuThread {
  u32 position_in_grid[3], threadgroup_in_grid[3], position_in_threadgroup[3];
  u32 threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3];
  u32 threadgroups_per_grid[3], threads_per_grid[3];
  u32 lane, simdgroup, index, simdgroups, dispatch_simdgroups;
};
typedef void (*EmuEntry)(void** buffers, const EmuThread* thread);

enum EmuKind : u32 { INPUT = 0, OUTPUT = 1, OUTPUT_WITH_VALUES = 2 };
struct EmuBuffer {
  u8* data;
  u64 size;
  u32 kind, unused;
  char name[64];
  u64 loads, loaded, stores, stored;  // loaded and stored: bytes
  u64 distinct_loaded, distinct_stored, unwritten, first_unwritten;
};
enum EmuOrder : u32 { FORWARD = 0, BACKWARD = 1, RANDOM = 2 };
struct EmuLaunch {
  EmuEntry entry;
  EmuBuffer* buffers;
  u32 num_buffers, grid[3], threadgroup[3], check, order, seed, workers, unused;
  u64 image_low, image_high;  // where the kernel's code and constants are mapped
};
}

namespace {

constexpr u64 STACK = 64 << 10;
constexpr u64 PAGE = 4096;
constexpr u64 GUARD = 256ull << 20;
constexpr u32 METAL_THREADGROUP_BYTES = 32 << 10;
constexpr u32 ARENA = 512 << 10;   // room for arrays beyond Metal's limit: refused with a message
constexpr u32 RED_ZONE = 64;       // bytes between two threadgroup arrays
constexpr u32 LANES = 32;
enum Space { THREADGROUP = 0, DEVICE = 1 };
enum Flags : u32 { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

struct Site {
  const char* operation = "start";
  const char* file = "";
  u32 line = 0, column = 0;
  bool same_place(const Site& other) const {
    return line == other.line && column == other.column &&
           (file == other.file || !strcmp(file, other.file));
  }
};

enum State { READY, WAITS_SIMD, WAITS_BARRIER, DONE };

struct Fibre {
  void* stack_pointer;
#if !defined(__x86_64__)
  ucontext_t context;
#endif
  u8* stack;
  EmuThread place;
  State state;
  Site site;
  u32 exchanges;      // picks one of two slot sets: a fast lane may be one exchange ahead
  u32 barriers[2];    // per space: threadgroup barriers passed
  u32 syncs[2];       // per space: barriers of either kind passed
};

struct SimdGroup {
  u32 lanes, arrived, running;
  Site site;
  alignas(16) u8 slots[2][LANES][16];
};

// One side of a possible race: who touched a byte last, and after how many barriers.
struct Touch {
  u32 thread = 0;  // index in the threadgroup + 1; 0: nobody
  u32 threadgroup = 0, barriers = 0, syncs = 0;
  bool atomic = false;
};
enum Spread : u8 { ONE, ONE_SIMD_GROUP, MANY };
struct Cell {
  Touch write, read;
  Spread readers = ONE;
};

struct Array {  // a threadgroup variable
  u32 offset, size;
  const char *name, *file;
  u32 line;
};

struct Worker;
thread_local Worker* self = nullptr;
thread_local sigjmp_buf fault_return;
thread_local bool fault_armed = false;

std::mutex report_lock;
std::string report;
std::atomic<u32> faults{0};

struct Worker {
  EmuLaunch* launch = nullptr;
  std::vector<Fibre> fibres;
  std::vector<SimdGroup> simds;
  std::vector<void*> pointers;
  void* main_stack = nullptr;
#if !defined(__x86_64__)
  ucontext_t main_context;
#endif
  Fibre* current = nullptr;
  u32 threads = 0, running = 0, at_barrier = 0, threadgroup = 0;
  Site barrier_site;
  bool stopped = false;
  // threadgroup memory
  u8* arena = nullptr;
  std::vector<Array> arrays;
  u32 arena_used = 0, array_bytes = 0;
  std::vector<u8> arena_written;
  std::vector<Cell> arena_cells;
  u8* stacks = nullptr;
  u64 stacks_size = 0;
};

struct Shadow {  // what check mode knows of a buffer's bytes
  std::vector<u8> loaded, stored;
  Cell* cells = nullptr;
};
std::vector<Shadow> shadows;

// ---- fibres ---------------------------------------------------------------------------------

#if defined(__x86_64__)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
void enter(Worker* w, Fibre* f) { emu_switch(&w->main_stack, f->stack_pointer); }
void leave_for_main(Worker* w, Fibre* f) { emu_switch(&f->stack_pointer, w->main_stack); }
void leave_for(Fibre* f, Fibre* next) { emu_switch(&f->stack_pointer, next->stack_pointer); }
#else
void enter(Worker* w, Fibre* f) { swapcontext(&w->main_context, &f->context); }
void leave_for_main(Worker* w, Fibre* f) { swapcontext(&f->context, &w->main_context); }
void leave_for(Fibre* f, Fibre* next) { swapcontext(&f->context, &next->context); }
#endif

// Hands over: to the next lane if it is that one's turn, else to the scheduler.
void leave(Worker* w, Fibre* f) {
  const SimdGroup& s = w->simds[f->place.simdgroup];
  u32 lane = f->place.lane + 1 == s.lanes ? 0 : f->place.lane + 1;
  Fibre* next = f - f->place.lane + lane;
  if (w->launch->order == FORWARD && !w->stopped && next != f && next->state == READY) {
    w->current = next;
    leave_for(f, next);
  } else {
    leave_for_main(w, f);
  }
}

void run_thread() {
  Worker* w = self;
  Fibre* f = w->current;
  w->launch->entry(w->pointers.data(), &f->place);
  f->state = DONE;
  f->site.operation = "return";
  f->site.line = 0;
  w->running--;
  w->simds[f->place.simdgroup].running--;
  leave(w, f);
  __builtin_trap();
}

void prepare(Worker* w, Fibre& f) {
#if defined(__x86_64__)
  // Stacks start at different offsets within a page, or they would compete for the same cache sets.
  void** top = reinterpret_cast<void**>(f.stack + STACK - f.place.lane % 16 * 256);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(run_thread);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  f.stack_pointer = top;
  (void)w;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack;
  f.context.uc_stack.ss_size = STACK;
  f.context.uc_link = &w->main_context;
  makecontext(&f.context, run_thread, 0);
#endif
}

// ---- faults ---------------------------------------------------------------------------------

std::string format(const char* text, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

std::string where(const Fibre* f) {
  const EmuThread& t = f->place;
  return format(" [thread (%u,%u,%u) of threadgroup (%u,%u,%u), SIMD group %u lane %u]",
                t.position_in_threadgroup[0], t.position_in_threadgroup[1],
                t.position_in_threadgroup[2], t.threadgroup_in_grid[0], t.threadgroup_in_grid[1],
                t.threadgroup_in_grid[2], t.simdgroup, t.lane);
}

// Reports the run's first fault and ends the run. `pc` is turned into lines by the Python side.
void fault(const std::string& message, const void* pc = nullptr) {
  Worker* w = self;
  {
    std::lock_guard<std::mutex> guard(report_lock);
    if (faults.fetch_add(1) == 0) {
      report = message;
      if (w->current) report += where(w->current);
      if (pc) report += format(" @pc 0x%llx",
                               (unsigned long long)((u64)pc - w->launch->image_low));
    }
  }
  w->stopped = true;
  if (w->current) leave(w, w->current);
}

std::string at(const Site& s) {
  return s.line ? format("%s (%s:%u)", s.operation, s.file, s.line) : s.operation;
}

// ---- the memory checker ---------------------------------------------------------------------

bool ordered(const Fibre* me, Space space, const Touch& other) {
  if (other.threadgroup != self->threadgroup) return false;
  if (other.barriers != me->barriers[space]) return true;
  u32 other_simd = (other.thread - 1) / LANES;
  return other_simd == me->place.simdgroup && other.syncs != me->syncs[space];
}

bool read_races_with_my_write(const Fibre* me, Space space, const Cell& cell) {
  const Touch& read = cell.read;
  if (!read.thread) return false;
  if (read.threadgroup != self->threadgroup) return true;
  if (cell.readers == MANY) return read.barriers == me->barriers[space];
  if (cell.readers == ONE && read.thread == me->place.index + 1) return false;
  return !ordered(me, space, read);
}

void note_read(const Fibre* me, Space space, Cell& cell, const Touch& now) {
  Touch& read = cell.read;
  bool stale = !read.thread || read.threadgroup != now.threadgroup ||
               read.barriers != now.barriers;
  if (stale) {
    read = now;
    cell.readers = ONE;
  } else if (read.thread != now.thread && cell.readers != MANY) {
    bool same_simd = (read.thread - 1) / LANES == me->place.simdgroup;
    if (!same_simd) {
      cell.readers = MANY;
    } else if (read.syncs != me->syncs[space]) {
      read = now;
      cell.readers = ONE;
    } else {
      cell.readers = ONE_SIMD_GROUP;
    }
  }
}

void race(const std::string& place, bool write, bool other_wrote, const Touch& other, Spread spread,
          const void* pc) {
  std::string who = spread == ONE ? format("thread %u", other.thread - 1) : "several threads";
  fault(format("data race on %s: %s here, %s by %s of threadgroup #%u with no barrier between",
               place.c_str(), write ? "written" : "read", other_wrote ? "written" : "read",
               who.c_str(), other.threadgroup),
        pc);
}

// One byte: `place` makes its name only when there is something to report.
template <class Name>
bool check_cell(Cell& cell, Space space, bool write, bool atomic, const void* pc, Name place) {
  const Fibre* me = self->current;
  Touch now{me->place.index + 1, self->threadgroup, me->barriers[space], me->syncs[space], atomic};
  const Touch& last = cell.write;
  bool mine = last.thread == now.thread && last.threadgroup == now.threadgroup;
  if (last.thread && !mine && !(atomic && last.atomic) && !ordered(me, space, last)) {
    race(place(), write, true, last, ONE, pc);
    return false;
  }
  if (write && !atomic && read_races_with_my_write(me, space, cell)) {
    race(place(), true, false, cell.read, cell.readers, pc);
    return false;
  }
  if (write)
    cell.write = now;
  else
    note_read(me, space, cell, now);
  return true;
}

struct Access {
  const u8* address;
  u64 size;
  bool write, atomic;
  const void* pc;
  const char* verb() const { return write ? "store" : "load"; }
};

void access_buffer(const Access& a, u32 number) {
  EmuBuffer& b = self->launch->buffers[number];
  long long offset = a.address - b.data;
  if (offset < 0 || offset + (long long)a.size > (long long)b.size)
    return fault(format("out of bounds: %s of %llu bytes at byte %lld of buffer `%s`, which has "
                        "%llu bytes",
                        a.verb(), (unsigned long long)a.size, offset, b.name,
                        (unsigned long long)b.size),
                 a.pc);
  if (a.write && b.kind == INPUT)
    return fault(format("store to input `%s` at byte %lld", b.name, offset), a.pc);
  Shadow& shadow = shadows[number];
  if (b.kind != INPUT) {
    auto name = [&](u64 i) {
      return [&b, offset, i] { return format("byte %lld of buffer `%s`", offset + (long long)i, b.name); };
    };
    for (u64 i = 0; i < a.size; i++) {
      if (!a.write && !shadow.stored[offset + i])
        return fault(format("load of byte %lld of output `%s`, which nobody has written",
                            offset + (long long)i, b.name),
                     a.pc);
      if (!check_cell(shadow.cells[offset + i], DEVICE, a.write, a.atomic, a.pc, name(i))) return;
    }
  }
  (a.write ? b.stores : b.loads)++;
  (a.write ? b.stored : b.loaded) += a.size;
  memset((a.write ? shadow.stored : shadow.loaded).data() + offset, 1, a.size);
}

void access_threadgroup(const Access& a) {
  Worker* w = self;
  u32 offset = a.address - w->arena;
  for (const Array& array : w->arrays) {
    if (offset + a.size <= array.offset || offset >= array.offset + array.size + RED_ZONE) continue;
    long long inside = (long long)offset - array.offset;
    if (inside < 0 || inside + a.size > array.size)
      return fault(format("out of bounds: %s of %llu bytes at byte %lld of threadgroup array `%s`, "
                          "which has %u bytes",
                          a.verb(), (unsigned long long)a.size, inside, array.name, array.size),
                   a.pc);
    for (u64 i = 0; i < a.size; i++) {
      auto name = [&] {
        return format("byte %lld of threadgroup array `%s`", inside + (long long)i, array.name);
      };
      if (!a.write && !w->arena_written[offset + i])
        return fault(format("load of %s, which nobody has written", name().c_str()), a.pc);
      if (!check_cell(w->arena_cells[offset + i], THREADGROUP, a.write, a.atomic, a.pc, name))
        return;
      if (a.write) w->arena_written[offset + i] = 1;
    }
    return;
  }
  fault(format("out of bounds: %s of %llu bytes of threadgroup memory in no array", a.verb(),
               (unsigned long long)a.size),
        a.pc);
}

void access(const void* address, u64 size, bool write, bool atomic, const void* pc, bool aligned) {
  Worker* w = self;
  if (!w || !w->current || w->stopped) return;
  const u8* p = static_cast<const u8*>(address);
  if (p >= w->current->stack && p < w->current->stack + STACK) return;
  Access a{p, size, write, atomic, pc};
  if (aligned && (u64)p & (size - 1))
    return fault(format("misaligned: %s of %llu bytes at an address that is a multiple of %llu",
                        a.verb(), (unsigned long long)size, (unsigned long long)((u64)p & -(u64)p)),
                 pc);
  if (p >= w->arena && p < w->arena + ARENA) return access_threadgroup(a);
  for (u32 i = 0; i < w->launch->num_buffers; i++) {
    const EmuBuffer& b = w->launch->buffers[i];
    if (p + size > b.data - GUARD / 2 && p < b.data + b.size + GUARD / 2)
      return access_buffer(a, i);
  }
  u64 image = (u64)p;
  if (!write && image >= w->launch->image_low && image < w->launch->image_high) return;
  fault(format("out of bounds: %s of %llu bytes at an address in no buffer, threadgroup array or "
               "variable of this thread",
               a.verb(), (unsigned long long)size),
        pc);
}

void on_signal(int signal, siginfo_t* info, void*) {
  if (!fault_armed || !self) {
    ::signal(signal, SIG_DFL);
    return;
  }
  Worker* w = self;
  const u8* p = static_cast<u8*>(info->si_addr);
  std::string message = "an address that is not mapped";
  for (u32 i = 0; i < w->launch->num_buffers; i++) {
    const EmuBuffer& b = w->launch->buffers[i];
    if (p >= b.data - GUARD && p < b.data + b.size + GUARD)
      message = format("byte %lld of buffer `%s`, which has %llu bytes",
                       (long long)(p - b.data), b.name, (unsigned long long)b.size);
  }
  {
    std::lock_guard<std::mutex> guard(report_lock);
    if (faults.fetch_add(1) == 0) {
      report = "out of bounds (guard page): " + message;
      if (w->current) report += where(w->current);
    }
  }
  w->stopped = true;
  siglongjmp(fault_return, 1);
}

// ---- threadgroups ---------------------------------------------------------------------------

void allocate(Worker& w, u32 threads) {
  w.fibres.resize(threads);
  w.simds.resize((threads + LANES - 1) / LANES);
  w.stacks_size = u64(threads) * (STACK + PAGE);
  w.stacks = (u8*)mmap(nullptr, w.stacks_size + ARENA, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (u32 i = 0; i < threads; i++) {
    u8* guard_page = w.stacks + i * (STACK + PAGE);
    mprotect(guard_page, PAGE, PROT_NONE);
    w.fibres[i].stack = guard_page + PAGE;
  }
  w.arena = w.stacks + w.stacks_size;
  w.arena_written.resize(ARENA);
  w.arena_cells.resize(ARENA);
}

// Workers keep their stacks from launch to launch: 256 mappings cost more than a small kernel.
std::vector<Worker*> idle_workers;
Worker* take_worker(u32 threads) {
  std::lock_guard<std::mutex> guard(report_lock);
  for (auto& slot : idle_workers)
    if (slot && slot->fibres.size() >= threads) {
      Worker* w = slot;
      std::swap(slot, idle_workers.back());
      idle_workers.pop_back();
      return w;
    }
  Worker* w = new Worker;
  allocate(*w, std::max(threads, 256u));
  return w;
}
void give_back(Worker* w) {
  std::lock_guard<std::mutex> guard(report_lock);
  idle_workers.push_back(w);
}

void place_threads(Worker& w, const u32 group[3], const u32 groups[3]) {
  EmuLaunch& l = *w.launch;
  u32 size[3];
  for (int i = 0; i < 3; i++)
    size[i] = std::min(l.threadgroup[i], l.grid[i] - group[i] * l.threadgroup[i]);
  u32 full = l.threadgroup[0] * l.threadgroup[1] * l.threadgroup[2];
  w.threads = w.running = size[0] * size[1] * size[2];
  w.at_barrier = 0;
  u32 simds = (w.threads + LANES - 1) / LANES;
  for (u32 s = 0; s < simds; s++) {
    w.simds[s].lanes = w.simds[s].running = std::min(LANES, w.threads - s * LANES);
    w.simds[s].arrived = 0;
  }
  for (u32 t = 0; t < w.threads; t++) {
    Fibre& f = w.fibres[t];
    u32 local[3] = {t % size[0], t / size[0] % size[1], t / size[0] / size[1]};
    for (int i = 0; i < 3; i++) {
      f.place.position_in_threadgroup[i] = local[i];
      f.place.threadgroup_in_grid[i] = group[i];
      f.place.position_in_grid[i] = group[i] * l.threadgroup[i] + local[i];
      f.place.threads_per_threadgroup[i] = size[i];
      f.place.dispatch_threads_per_threadgroup[i] = l.threadgroup[i];
      f.place.threadgroups_per_grid[i] = groups[i];
      f.place.threads_per_grid[i] = l.grid[i];
    }
    f.place.index = t;
    f.place.lane = t % LANES;
    f.place.simdgroup = t / LANES;
    f.place.simdgroups = simds;
    f.place.dispatch_simdgroups = (full + LANES - 1) / LANES;
    f.state = READY;
    f.site = Site{};
    f.exchanges = 0;
    f.barriers[0] = f.barriers[1] = f.syncs[0] = f.syncs[1] = 0;
    prepare(&w, f);
  }
}

void clear_arena(Worker& w) {
  if (w.launch->check) {
    std::fill_n(w.arena_written.begin(), w.arena_used, 0);
    std::fill_n(w.arena_cells.begin(), w.arena_used, Cell{});
  }
  memset(w.arena, 0xFF, w.arena_used);  // NaN, whatever the float type
  w.arrays.clear();
  w.arena_used = w.array_bytes = 0;
}

std::string deadlock(const Worker& w) {
  std::vector<std::pair<std::string, u32>> waiting;
  for (u32 i = 0; i < w.threads; i++) {
    std::string place = at(w.fibres[i].site);
    auto found = std::find_if(waiting.begin(), waiting.end(),
                              [&](auto& entry) { return entry.first == place; });
    if (found == waiting.end())
      waiting.push_back({place, 1});
    else
      found->second++;
  }
  const u32* g = w.fibres[0].place.threadgroup_in_grid;
  std::string text = format("deadlock in threadgroup (%u,%u,%u): ", g[0], g[1], g[2]);
  for (auto& [place, count] : waiting) text += format("%u threads at %s; ", count, place.c_str());
  return text;
}

u64 next_random(u64& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}
template <class T>
void arrange(std::vector<T>& items, u32 order, u64& random) {
  if (order == BACKWARD) std::reverse(items.begin(), items.end());
  if (order == RANDOM)
    for (u64 i = items.size(); i > 1; i--) std::swap(items[i - 1], items[next_random(random) % i]);
}

// Runs one SIMD group until its lanes wait for other groups or are done. One group at a time:
// 32 stacks stay in the cache.
bool run_simdgroup(Worker& w, u32 number, std::vector<u32>& lanes, u64& random) {
  bool progress = false;
  for (bool again = true; again && !w.stopped;) {
    again = false;
    if (w.launch->order == RANDOM) arrange(lanes, RANDOM, random);
    for (u32 lane : lanes) {
      u32 t = number * LANES + lane;
      if (t >= w.threads || w.fibres[t].state != READY) continue;
      again = progress = true;
      w.current = &w.fibres[t];
      enter(&w, w.current);
      if (w.stopped) return true;
    }
  }
  return progress;
}

void run_threadgroup(Worker& w, u64& random) {
  std::vector<u32> lanes(LANES), simds((w.threads + LANES - 1) / LANES);
  for (u32 i = 0; i < lanes.size(); i++) lanes[i] = i;
  for (u32 i = 0; i < simds.size(); i++) simds[i] = i;
  arrange(lanes, w.launch->order, random);
  while (w.running && !w.stopped) {
    bool progress = false;
    arrange(simds, w.launch->order, random);
    for (u32 s : simds)
      if (!w.stopped) progress |= run_simdgroup(w, s, lanes, random);
    if (w.stopped) return;
    w.current = nullptr;
    if (!progress && w.running) fault(deadlock(w));
  }
}

void work(EmuLaunch* launch, u32 number, u32 workers) {
  u32 threads = launch->threadgroup[0] * launch->threadgroup[1] * launch->threadgroup[2];
  Worker* w = take_worker(threads);
  self = w;
  w->launch = launch;
  w->stopped = false;
  w->pointers.clear();
  for (u32 i = 0; i < launch->num_buffers; i++) w->pointers.push_back(launch->buffers[i].data);
  std::vector<u8> signal_stack(1 << 16);
  stack_t alternate{}, before{};
  alternate.ss_sp = signal_stack.data();
  alternate.ss_size = signal_stack.size();
  sigaltstack(&alternate, &before);

  u32 groups[3];
  for (int i = 0; i < 3; i++)
    groups[i] = (launch->grid[i] + launch->threadgroup[i] - 1) / launch->threadgroup[i];
  u64 random = launch->seed * 2654435761ull + 88172645463325252ull + number;
  std::vector<u32> sequence(groups[0] * groups[1] * groups[2]);
  for (u32 i = 0; i < sequence.size(); i++) sequence[i] = i;
  arrange(sequence, launch->order, random);
  for (u32 i = number; i < sequence.size() && !faults; i += workers) {
    u32 id = sequence[i];
    u32 group[3] = {id % groups[0], id / groups[0] % groups[1], id / groups[0] / groups[1]};
    w->threadgroup = id;
    place_threads(*w, group, groups);
    fault_armed = true;
    if (!sigsetjmp(fault_return, 1)) run_threadgroup(*w, random);
    fault_armed = false;
    w->current = nullptr;
    clear_arena(*w);
  }
  sigaltstack(&before, nullptr);
  self = nullptr;
  give_back(w);
}

void count_bytes(EmuBuffer& b, const Shadow& shadow) {
  for (u64 i = 0; i < b.size; i++) {
    b.distinct_loaded += shadow.loaded[i];
    if (b.kind == INPUT) continue;
    b.distinct_stored += shadow.stored[i];
    if (!shadow.stored[i] && b.unwritten++ == 0) b.first_unwritten = i;
  }
}

}  // namespace

// ---- called by the kernel (metal_stdlib) ----------------------------------------------------

extern "C" {

const u8 (*emu_exchange(const void* value, u32 size, const char* operation, const char* file,
                        u32 line, u32 column))[16] {
  Worker* w = self;
  Fibre* f = w->current;
  SimdGroup& s = w->simds[f->place.simdgroup];
  f->site = Site{operation, file, line, column};
  if (s.arrived && !s.site.same_place(f->site))
    fault(format("divergent SIMD group: this lane is at %s while %u others of its group wait at %s",
                 at(f->site).c_str(), s.arrived, at(s.site).c_str()));
  if (s.running != s.lanes)
    fault(format("divergent SIMD group: %s after %u of %u lanes have returned", at(f->site).c_str(),
                 s.lanes - s.running, s.lanes));
  u32 set = f->exchanges++ & 1;
  memcpy(s.slots[set][f->place.lane], value, size);
  s.site = f->site;
  if (++s.arrived == s.lanes) {
    s.arrived = 0;
    u32 first = f->place.simdgroup * LANES;
    for (u32 i = 0; i < s.lanes; i++) w->fibres[first + i].state = READY;
  } else {
    f->state = WAITS_SIMD;
    leave(w, f);
  }
  return s.slots[set];
}

u32 emu_lane() { return self->current->place.lane; }
u32 emu_lanes() { return self->simds[self->current->place.simdgroup].lanes; }

void emu_barrier(int simdgroup, u32 flags, const char* file, u32 line, u32 column) {
  Worker* w = self;
  Fibre* f = w->current;
  if (simdgroup) {
    u32 meet = 0;
    emu_exchange(&meet, sizeof meet, "simdgroup_barrier", file, line, column);
    f->syncs[THREADGROUP] += (flags & MEM_THREADGROUP) != 0;
    f->syncs[DEVICE] += (flags & MEM_DEVICE) != 0;
    return;
  }
  SimdGroup& s = w->simds[f->place.simdgroup];
  f->site = Site{"threadgroup_barrier", file, line, column};
  if (s.arrived)
    fault(format("divergent SIMD group: this lane is at %s while %u others of its group wait at %s",
                 at(f->site).c_str(), s.arrived, at(s.site).c_str()));
  if (w->at_barrier && !w->barrier_site.same_place(f->site))
    fault(format("divergent barrier: this thread is at %s while %u others wait at %s",
                 at(f->site).c_str(), w->at_barrier, at(w->barrier_site).c_str()));
  if (w->running != w->threads)
    fault(format("divergent barrier: %s after %u of %u threads have returned", at(f->site).c_str(),
                 w->threads - w->running, w->threads));
  w->barrier_site = f->site;
  if (++w->at_barrier == w->threads) {
    w->at_barrier = 0;
    for (u32 i = 0; i < w->threads; i++) w->fibres[i].state = READY;
  } else {
    f->state = WAITS_BARRIER;
    leave(w, f);
  }
  for (Space space : {THREADGROUP, DEVICE}) {
    bool covers = flags & (space == DEVICE ? MEM_DEVICE : MEM_THREADGROUP);
    f->barriers[space] += covers;
    f->syncs[space] += covers;
  }
}

// The memory of the threadgroup array declared at this line: the same for all its threads.
void* emu_threadgroup(u64 size, u64 align, const char* name, const char* file, u32 line) {
  Worker* w = self;
  for (const Array& a : w->arrays)
    if (a.line == line && a.size == size && !strcmp(a.name, name) && !strcmp(a.file, file))
      return w->arena + a.offset;
  w->array_bytes += size;
  w->current->site = Site{"threadgroup", file, line, 0};
  if (w->array_bytes > METAL_THREADGROUP_BYTES)
    fault(format("%u bytes of threadgroup memory with array `%s` (%s:%u): Metal has 32768",
                 w->array_bytes, name, file, line));
  u32 offset = (w->arena_used + RED_ZONE + 15) / 16 * 16;
  (void)align;
  w->arrays.push_back({offset, (u32)size, name, file, line});
  w->arena_used = offset + size + RED_ZONE;
  memset(w->arena + offset, 0xFF, size);
  return w->arena + offset;
}

void emu_atomic(const volatile void* p, u32 size, int load, int store) {
  if (!self->launch->check) return;
  const void* pc = __builtin_return_address(0);
  if (load) access(const_cast<const void*>(p), size, false, true, pc, true);
  if (store) access(const_cast<const void*>(p), size, true, true, pc, true);
}

void emu_fail(const char* message, const char* file, u32 line) {
  fault(format("%s (%s:%u)", message, file, line));
}

// ---- called by the compiler's instrumentation -----------------------------------------------

#define PC __builtin_return_address(0)
#define TSAN(n) \
  void __tsan_read##n(void* p) { access(p, n, false, false, PC, true); } \
  void __tsan_write##n(void* p) { access(p, n, true, false, PC, true); } \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false, false, PC, false); } \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true, false, PC, false); } \
  void __tsan_read_write##n(void* p) { \
    access(p, n, false, false, PC, true); \
    access(p, n, true, false, PC, true); \
  } \
  void __tsan_unaligned_read_write##n(void* p) { \
    access(p, n, false, false, PC, false); \
    access(p, n, true, false, PC, false); \
  }
TSAN(1) TSAN(2) TSAN(4) TSAN(8) TSAN(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void* __tsan_memcpy(void* to, const void* from, u64 n) {
  access(from, n, false, false, PC, false);
  access(to, n, true, false, PC, false);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, u64 n) {
  access(from, n, false, false, PC, false);
  access(to, n, true, false, PC, false);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, u64 n) {
  access(to, n, true, false, PC, false);
  return memset(to, value, n);
}

struct UbsanSite {
  const char* file;
  u32 line, column;
};
#define UBSAN(name, message, ...) \
  void __ubsan_handle_##name(UbsanSite* s, ##__VA_ARGS__) { \
    if (self && self->current) fault(format("%s (%s:%u)", message, s->file, s->line)); \
  }
UBSAN(out_of_bounds, "array index out of its bounds", u64)
UBSAN(type_mismatch_v1, "misaligned or null pointer access", u64)
UBSAN(shift_out_of_bounds, "shift out of range", u64, u64)
UBSAN(divrem_overflow, "division by zero or overflow in /", u64, u64)
UBSAN(add_overflow, "integer overflow in +", u64, u64)
UBSAN(sub_overflow, "integer overflow in -", u64, u64)
UBSAN(mul_overflow, "integer overflow in *", u64, u64)
UBSAN(negate_overflow, "integer overflow in unary -", u64)
UBSAN(float_cast_overflow, "float to integer out of range", u64)
UBSAN(missing_return, "a function ended without return")
UBSAN(builtin_unreachable, "unreachable code was reached")

#if defined(__clang__)
__bf16 __truncsfbf2(float x) {  // older libgccs lack it; round to nearest even
  u32 bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000)
    bits |= 0x400000;
  else
    bits += 0x7fff + ((bits >> 16) & 1);
  uint16_t high = bits >> 16;
  __bf16 result;
  memcpy(&result, &high, 2);
  return result;
}
#endif

// ---- called from Python ---------------------------------------------------------------------

u32 emu_run(EmuLaunch* launch, char* message, u64 message_size) {
  report.clear();
  faults = 0;
  shadows.clear();
  if (launch->check)
    for (u32 i = 0; i < launch->num_buffers; i++) {
      EmuBuffer& b = launch->buffers[i];
      Shadow shadow;
      shadow.loaded.assign(b.size, 0);
      if (b.kind != INPUT) {
        shadow.stored.assign(b.size, b.kind == OUTPUT_WITH_VALUES);
        void* cells = mmap(nullptr, b.size * sizeof(Cell) + PAGE, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        shadow.cells = static_cast<Cell*>(cells);  // zero pages are empty cells
      }
      shadows.push_back(std::move(shadow));
    }
  struct sigaction action{}, segv, bus;
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &segv);
  sigaction(SIGBUS, &action, &bus);
  u32 workers = launch->check ? 1 : std::max(1u, launch->workers);
  std::vector<std::thread> threads;
  for (u32 i = 0; i < workers; i++) threads.emplace_back(work, launch, i, workers);
  for (auto& thread : threads) thread.join();
  sigaction(SIGSEGV, &segv, nullptr);
  sigaction(SIGBUS, &bus, nullptr);
  for (u32 i = 0; i < shadows.size(); i++) {
    EmuBuffer& b = launch->buffers[i];
    count_bytes(b, shadows[i]);
    if (shadows[i].cells) munmap(shadows[i].cells, b.size * sizeof(Cell) + PAGE);
  }
  shadows.clear();
  snprintf(message, message_size, "%s", report.c_str());
  return faults;
}

// A buffer whose end, rounded up to 16 bytes, meets a guard zone; another lies before it.
u8* emu_allocate(u64 size) {
  u64 body = std::max(PAGE, (size + PAGE - 1) / PAGE * PAGE);
  u8* p = (u8*)mmap(nullptr, body + 2 * GUARD, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  mprotect(p + GUARD, body, PROT_READ | PROT_WRITE);
  return p + GUARD + body - (size + 15) / 16 * 16;
}
void emu_free(u8* data, u64 size) {
  u64 body = std::max(PAGE, (size + PAGE - 1) / PAGE * PAGE);
  munmap(data + (size + 15) / 16 * 16 - body - GUARD, body + 2 * GUARD);
}
}
