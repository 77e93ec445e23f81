// A driver of NVIDIA's interface for a machine without a GPU. It runs no kernel; it refuses what a device would refuse.
//
// Memory of the device is memory of the process: copies and fills are done, within one allocation or not at all. Modules
// are read as far as it takes to know what a kernel needs: registers, shared memory, threads, parameters. A launch is
// refused that has no room on a multiprocessor, more blocks than a grid may have, cooperative blocks that are not there
// at once, attributes that the device does not know, or an address in its parameters that lies in no allocation; a tensor
// map where a stride, a box or an address breaks the rules of the interface. Why is written to standard error. What
// kernels would have computed stays as it was, but for words of host memory that are all ones, where they leave tokens.
//
// NULL_DRIVER="COMPUTE MULTIPROCESSORS DEVICES", as "75 40 1", says what there is. NULL_DRIVER_FAULT="lost 123": from
// call 123 on the device is lost; "memory 12": there is none for the 12th request.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint64_t Address;
typedef enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_IMAGE = 200,
  NOT_FOUND = 500,
  OUT_OF_RESOURCES = 701,
  LAUNCH_FAILED = 719,
  COOPERATIVE_LAUNCH_TOO_LARGE = 720,
  NOT_SUPPORTED = 801,
} Result;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Result refuse(Result result, const char* format, ...) {
  va_list values;
  va_start(values, format);
  pthread_mutex_lock(&lock);
  fputs("null driver: ", stderr);
  vfprintf(stderr, format, values);
  fputc('\n', stderr);
  pthread_mutex_unlock(&lock);
  va_end(values);
  return result;
}

// ---- what there is, and what fails

static int compute = 90, multiprocessors = 132, devices = 1;
static long lost = 0, without_memory = 0;  // the call, the request for memory, from 1 on; 0: none
static long calls, requests, launches;

__attribute__((constructor)) static void read_environment(void) {
  const char *text = getenv("NULL_DRIVER"), *fault = getenv("NULL_DRIVER_FAULT");
  if ((text && sscanf(text, "%d %d %d", &compute, &multiprocessors, &devices) != 3) ||
      (fault && sscanf(fault, "lost %ld", &lost) != 1 && sscanf(fault, "memory %ld", &without_memory) != 1)) {
    fputs("null driver: NULL_DRIVER or NULL_DRIVER_FAULT cannot be read\n", stderr);
    abort();
  }
}
__attribute__((destructor)) static void tell(void) {
  fprintf(stderr, "null driver: %ld launches, %ld calls, %ld requests for memory\n", launches, calls, requests);
}

// Whether a call succeeds as far as faults go.
static Result called(void) {
  const long call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
  return lost && call >= lost ? LAUNCH_FAILED : SUCCESS;
}
static Result called_for_memory(void) {
  const long request = __atomic_add_fetch(&requests, 1, __ATOMIC_RELAXED);
  if (called()) return LAUNCH_FAILED;
  return request == without_memory ? OUT_OF_MEMORY : SUCCESS;
}

// ---- devices

// By the table of compute capabilities in CUDA's programming guide: bytes of shared memory a block and a multiprocessor,
// bytes of it that each block loses, warps and blocks a multiprocessor.
typedef struct {
  int of_block, of_multiprocessor, lost, warps, blocks;
} Limits;

static Limits limits(void) {
  switch (compute) {
    case 75: return (Limits){65536, 65536, 0, 32, 16};
    case 80: return (Limits){166912, 167936, 1024, 64, 32};
    case 86: return (Limits){101376, 102400, 1024, 48, 16};
    case 87: return (Limits){166912, 167936, 1024, 48, 16};
    case 89: return (Limits){101376, 102400, 1024, 48, 24};
    case 90:
    case 100: return (Limits){232448, 233472, 1024, 64, 32};
    case 120: return (Limits){101376, 102400, 1024, 48, 24};
    default: fprintf(stderr, "null driver: no device of compute capability %d\n", compute); abort();
  }
}

Result cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
Result cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
Result cuDeviceGetCount(int* count) { return *count = devices, SUCCESS; }
Result cuDeviceGet(int* device, int index) { return *device = index, SUCCESS; }
Result cuDeviceGetName(char* name, int size, int device) {
  snprintf(name, (size_t)size, "no GPU, sm_%d with %d multiprocessors", compute, multiprocessors);
  return (void)device, SUCCESS;
}
Result cuDeviceTotalMem_v2(size_t* bytes, int device) { return (void)device, *bytes = 150ull << 30, SUCCESS; }
Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 13: *value = 1980000; return SUCCESS;  // clock, kHz
    case 16: *value = multiprocessors; return SUCCESS;
    case 36: *value = 3201000; return SUCCESS;  // clock of the memory, kHz
    case 37: *value = 6144; return SUCCESS;  // bits of its bus
    case 38: *value = compute == 75 ? 4 << 20 : 40 << 20; return SUCCESS;  // second-level cache
    case 75: *value = compute / 10; return SUCCESS;
    case 76: *value = compute % 10; return SUCCESS;
    case 97: *value = limits().of_block; return SUCCESS;
    default: return refuse(INVALID_VALUE, "no attribute %d of devices", attribute);
  }
}
Result cuDeviceCanAccessPeer(int* can, int device, int other) { return (void)device, (void)other, *can = 1, SUCCESS; }
Result cuGetErrorString(Result result, const char** text) {
  switch (result) {
    case INVALID_VALUE: *text = "invalid argument"; return SUCCESS;
    case OUT_OF_MEMORY: *text = "out of memory"; return SUCCESS;
    case INVALID_IMAGE: *text = "device kernel image is invalid"; return SUCCESS;
    case NOT_FOUND: *text = "named symbol not found"; return SUCCESS;
    case OUT_OF_RESOURCES: *text = "too many resources requested for launch"; return SUCCESS;
    case LAUNCH_FAILED: *text = "unspecified launch failure"; return SUCCESS;
    case COOPERATIVE_LAUNCH_TOO_LARGE: *text = "too many blocks in cooperative launch"; return SUCCESS;
    case NOT_SUPPORTED: *text = "operation not supported"; return SUCCESS;
    default: return INVALID_VALUE;
  }
}

// ---- contexts

static __thread void* current;

Result cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = (void*)(intptr_t)(device + 1), SUCCESS;
}
Result cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, SUCCESS; }
Result cuCtxGetCurrent(void** context) { return *context = current, SUCCESS; }
Result cuCtxSetCurrent(void* context) { return current = context, SUCCESS; }
Result cuCtxEnablePeerAccess(void* context, unsigned flags) { return (void)context, (void)flags, SUCCESS; }

// ---- memory: addresses of devices are those of one range, from a number on whose halves are no usual sizes, so that they are known
// among other numbers

static const Address FIRST = 0x7d3b00000000;
static const size_t PAGE = 2 << 20;
static struct {
  Address begin;
  size_t size;
} allocations[1 << 16];
static int allocation_count;
static Address next_address = 0x7d3b00000000;

static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Whether so many bytes lie in one allocation.
static int is_allocated(Address begin, size_t bytes) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < allocation_count && !found; i++) {
    const size_t at = begin - allocations[i].begin;
    found = allocations[i].begin && at <= allocations[i].size && bytes <= allocations[i].size - at;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

Result cuMemAlloc_v2(Address* pointer, size_t bytes) {
  const Result fault = called_for_memory();
  if (fault) return fault;

  if (bytes == 0) return refuse(INVALID_VALUE, "an allocation of nothing");
  pthread_mutex_lock(&lock);
  int slot = 0;
  while (slot < allocation_count && allocations[slot].begin) slot++;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void* memory = slot < (int)(sizeof allocations / sizeof *allocations)
                     ? mmap((void*)next_address, pages(bytes), PROT_READ | PROT_WRITE, flags, -1, 0)
                     : MAP_FAILED;
  if (memory != MAP_FAILED) {
    if (slot == allocation_count) allocation_count++;
    allocations[slot].begin = *pointer = next_address;
    allocations[slot].size = bytes;
    next_address += pages(bytes) + PAGE;
  }
  pthread_mutex_unlock(&lock);
  return memory == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}

Result cuMemFree_v2(Address pointer) {
  pthread_mutex_lock(&lock);
  int slot = 0;
  while (slot < allocation_count && allocations[slot].begin != pointer) slot++;
  if (slot < allocation_count) {
    munmap((void*)pointer, pages(allocations[slot].size));
    allocations[slot].begin = 0;
  }
  pthread_mutex_unlock(&lock);
  return slot < allocation_count ? SUCCESS : refuse(INVALID_VALUE, "%#lx is freed, which is no allocation", pointer);
}

Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (called()) return LAUNCH_FAILED;
  return *free = 140ull << 30, *total = 150ull << 30, SUCCESS;
}

// A copy or a fill beyond this size changes nothing that a program looks at: it would only take time.
static const size_t LARGE = 16 << 20;

Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
  if (called()) return LAUNCH_FAILED;

  (void)stream;
  if (!is_allocated(to, bytes)) return refuse(INVALID_VALUE, "%zu bytes are copied to %#lx", bytes, to);
  return memcpy((void*)to, from, bytes), SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
  if (called()) return LAUNCH_FAILED;

  (void)stream;
  if (!is_allocated(from, bytes)) return refuse(INVALID_VALUE, "%zu bytes are copied from %#lx", bytes, from);
  return memcpy(to, (const void*)from, bytes), SUCCESS;
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
  if (called()) return LAUNCH_FAILED;

  (void)stream;
  if (!is_allocated(to, bytes) || !is_allocated(from, bytes))
    return refuse(INVALID_VALUE, "%zu bytes are copied from %#lx to %#lx", bytes, from, to);
  if (bytes <= LARGE) memmove((void*)to, (const void*)from, bytes);
  return SUCCESS;
}
Result cuMemsetD8Async(Address to, unsigned char byte, size_t bytes, void* stream) {
  if (called()) return LAUNCH_FAILED;

  (void)stream;
  if (!is_allocated(to, bytes)) return refuse(INVALID_VALUE, "%zu bytes are filled at %#lx", bytes, to);
  if (bytes <= LARGE) memset((void*)to, byte, bytes);
  return SUCCESS;
}

// Memory of the host that kernels write to.
static struct {
  uint64_t* words;
  size_t count;
} host[1024];

Result cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  const Result fault = called_for_memory();
  if (fault) return fault;

  (void)flags;
  if (bytes == 0 || bytes > 1ull << 40) return OUT_OF_MEMORY;
  uint64_t* words = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  *pointer = words;
  if (!words) return OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 1024 && words; i++)
    if (!host[i].words) host[i].words = words, host[i].count = bytes / 8, words = NULL;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
Result cuMemFreeHost(void* pointer) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 1024; i++)
    if (host[i].words == pointer) host[i].words = NULL;
  pthread_mutex_unlock(&lock);
  return free(pointer), SUCCESS;
}
// What is done by then: token 5, wherever none was left yet.
static void leave_tokens(void) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 1024; i++)
    for (size_t k = 0; host[i].words && host[i].count <= 4096 && k < host[i].count; k++)
      if (host[i].words[k] == ~0ull) host[i].words[k] = 5;
  pthread_mutex_unlock(&lock);
}

// Memory of another process becomes memory of this one, of the same size.
typedef struct {
  size_t size;
  char rest[56];
} Handle;
Result cuIpcGetMemHandle(Handle* handle, Address pointer) {
  handle->size = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < allocation_count; i++)
    if (allocations[i].begin == pointer) handle->size = allocations[i].size;
  pthread_mutex_unlock(&lock);
  return handle->size ? SUCCESS : refuse(INVALID_VALUE, "%#lx is handed out, which is no allocation", pointer);
}
Result cuIpcOpenMemHandle_v2(Address* pointer, Handle handle, unsigned flags) {
  return flags == 1 ? cuMemAlloc_v2(pointer, handle.size) : INVALID_VALUE;
}
Result cuIpcCloseMemHandle(Address pointer) { return cuMemFree_v2(pointer); }

// ---- streams, events and graphs: all is done when it is asked for, or never

static int something;
static __thread int captures;

Result cuStreamCreate(void** stream, unsigned flags) {
  if (called()) return LAUNCH_FAILED;
  return (void)flags, *stream = &something, SUCCESS;
}
Result cuStreamDestroy_v2(void* stream) { return (void)stream, SUCCESS; }
Result cuStreamSynchronize(void* stream) {
  if (called()) return LAUNCH_FAILED;
  return (void)stream, leave_tokens(), SUCCESS;
}
Result cuStreamQuery(void* stream) {
  if (called()) return LAUNCH_FAILED;
  return (void)stream, leave_tokens(), SUCCESS;
}
Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  if (called()) return LAUNCH_FAILED;

  return (void)stream, (void)event, (void)flags, SUCCESS;
}
Result cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  if (called()) return LAUNCH_FAILED;

  (void)stream;
  if (!captures) function(data);
  return SUCCESS;
}
Result cuEventCreate(void** event, unsigned flags) {
  if (called()) return LAUNCH_FAILED;
  return (void)flags, *event = &something, SUCCESS;
}
Result cuEventDestroy_v2(void* event) { return (void)event, SUCCESS; }
Result cuEventRecord(void* event, void* stream) {
  if (called()) return LAUNCH_FAILED;
  return (void)event, (void)stream, SUCCESS;
}
Result cuEventSynchronize(void* event) {
  if (called()) return LAUNCH_FAILED;
  return (void)event, leave_tokens(), SUCCESS;
}
Result cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  if (called()) return LAUNCH_FAILED;

  return (void)begin, (void)end, *milliseconds = 0.1f, SUCCESS;
}
Result cuStreamBeginCapture_v2(void* stream, int mode) {
  if (called()) return LAUNCH_FAILED;
  return (void)stream, (void)mode, captures = 1, SUCCESS;
}
Result cuStreamEndCapture(void* stream, void** graph) {
  if (called()) return LAUNCH_FAILED;

  return (void)stream, captures = 0, *graph = &something, SUCCESS;
}
Result cuStreamIsCapturing(void* stream, int* status) { return (void)stream, *status = captures, SUCCESS; }
Result cuThreadExchangeStreamCaptureMode(int* mode) { return (void)mode, SUCCESS; }
Result cuGraphInstantiateWithFlags(void** launchable, void* graph, unsigned long long flags) {
  if (called()) return LAUNCH_FAILED;

  return (void)graph, (void)flags, *launchable = &something, SUCCESS;
}
Result cuGraphDestroy(void* graph) { return (void)graph, SUCCESS; }
Result cuGraphExecDestroy(void* graph) { return (void)graph, SUCCESS; }
Result cuGraphLaunch(void* graph, void* stream) {
  if (called()) return LAUNCH_FAILED;
  return (void)graph, (void)stream, SUCCESS;
}

// ---- modules: ELF files of 64 bits

typedef struct {
  unsigned char* image;
  size_t size;
} Module;

enum { MOST_PARAMETERS = 16 };
typedef struct {
  char name[256];
  int parameters, sizes[MOST_PARAMETERS];
  int registers, shared, threads;
} Function;

static uint64_t number(const unsigned char* from, size_t bytes) {
  uint64_t value = 0;
  return memcpy(&value, from, bytes), value;
}
static uint64_t header_count(const unsigned char* image) { return number(image + 0x3c, 2); }
static const unsigned char* header(const unsigned char* image, uint64_t index) {
  return image + number(image + 0x28, 8) + index * 64;
}

Result cuModuleLoadData(Module** module, const unsigned char* image) {
  if (called()) return LAUNCH_FAILED;

  if (memcmp(image, "\177ELF", 4) != 0) return refuse(INVALID_IMAGE, "PTX, which nothing translates here");
  const int code = (int)(number(image + 0x30, 4) >> 8 & 0xff);
  // Code of the same major number and no later minor one runs; code for instructions of its own (sm_90a) on its own only.
  if (code / 10 != compute / 10 || code > compute)
    return refuse(INVALID_IMAGE, "code for sm_%d on a device of sm_%d", code, compute);
  uint64_t size = number(image + 0x28, 8) + header_count(image) * 64;
  for (uint64_t i = 0; i < header_count(image); i++) {
    const unsigned char* section = header(image, i);
    const uint64_t end = number(section + 0x18, 8) + number(section + 0x20, 8);
    if (number(section + 4, 4) != 8 && end > size) size = end;
  }
  *module = malloc(sizeof **module);
  **module = (Module){memcpy(malloc(size), image, size), size};
  return SUCCESS;
}
Result cuModuleUnload(Module* module) { return free(module->image), free(module), SUCCESS; }

// A section of a name, and its size.
static const unsigned char* section(const Module* module, uint64_t* size, const char* format, const char* of) {
  char name[512];
  snprintf(name, sizeof name, format, of);
  const unsigned char* names = header(module->image, number(module->image + 0x3e, 2));
  const char* texts = (const char*)module->image + number(names + 0x18, 8);
  for (uint64_t i = 0; i < header_count(module->image); i++) {
    const unsigned char* found = header(module->image, i);
    if (strcmp(texts + number(found, 4), name) != 0) continue;
    *size = number(found + 0x20, 8);
    // Memory that a launch gives is a section of the size of its alignment.
    if (number(found + 4, 4) == 8 && *size == number(found + 0x30, 8)) *size = 0;
    return module->image + number(found + 0x18, 8);
  }
  *size = 0;
  return NULL;
}

Result cuModuleGetFunction(Function** out, const Module* module, const char* name) {
  if (called()) return LAUNCH_FAILED;

  uint64_t size, other;
  if (!section(module, &size, ".text.%s", name)) return refuse(NOT_FOUND, "no kernel %s", name);
  Function* function = *out = calloc(1, sizeof *function);
  snprintf(function->name, sizeof function->name, "%s", name);
  function->threads = 1024;
  section(module, &size, ".nv.shared.%s", name);
  function->shared = (int)size;
  const char* texts = (const char*)section(module, &other, ".strtab", "");
  const unsigned char* symbols = section(module, &other, ".symtab", "");
  const unsigned char* of_module = section(module, &size, ".nv.info", "");
  const unsigned char* of_kernel = section(module, &other, ".nv.info.%s", name);
  const struct {
    const unsigned char *begin, *end;
  } lists[] = {{of_module, of_module + size}, {of_kernel, of_kernel + other}};
  // Entries: a form, an attribute, a size, and where the form is 4 so many bytes.
  for (int list = 0; list < 2; list++)
    for (const unsigned char *at = lists[list].begin, *next; at && at < lists[list].end; at = next) {
      next = at + 4 + (at[0] == 4 ? number(at + 2, 2) : 0);
      if (at[0] != 4) continue;
      if (at[1] == 0x2f && strcmp(texts + number(symbols + number(at + 4, 4) * 24, 4), name) == 0)
        function->registers = (int)number(at + 8, 4);
      if (at[1] == 0x05) function->threads = (int)(number(at + 4, 4) * number(at + 8, 4) * number(at + 12, 4));
      const uint64_t ordinal = at[1] == 0x17 ? number(at + 8, 2) : MOST_PARAMETERS;
      if (ordinal < MOST_PARAMETERS) {
        function->sizes[ordinal] = (int)(number(at + 12, 4) >> 18);
        if (function->parameters <= (int)ordinal) function->parameters = (int)ordinal + 1;
      }
    }
  if (!function->registers) return refuse(INVALID_IMAGE, "registers of %s are not told", name);
  return SUCCESS;
}

Result cuFuncGetAttribute(int* value, int attribute, const Function* function) {
  switch (attribute) {
    case 0: *value = function->threads; return SUCCESS;
    case 1: *value = function->shared; return SUCCESS;
    case 3: *value = 0; return SUCCESS;  // local memory
    case 4: *value = function->registers; return SUCCESS;
    default: return refuse(INVALID_VALUE, "no attribute %d of kernels", attribute);
  }
}
Result cuFuncSetAttribute(const Function* function, int attribute, int value) {
  if (called()) return LAUNCH_FAILED;

  if (attribute != 8 || value > limits().of_block - function->shared)
    return refuse(INVALID_VALUE, "attribute %d of %s becomes %d", attribute, function->name, value);
  return SUCCESS;
}

// Blocks that a multiprocessor holds.
static int occupancy(const Function* function, int threads, size_t dynamic) {
  const Limits most = limits();
  const size_t shared = dynamic + (size_t)function->shared;
  const int warps = (threads + 31) / 32;
  if (threads < 1 || threads > function->threads || threads > 1024 || shared > (size_t)most.of_block) return 0;
  // Registers are given to warps in pieces of 256, of four files.
  const int of_warp = (function->registers * 32 + 255) / 256 * 256;
  int blocks = 4 * (65536 / 4 / of_warp) / warps;
  if (blocks > most.warps / warps) blocks = most.warps / warps;
  if (blocks > most.blocks) blocks = most.blocks;
  const size_t taken = shared + (size_t)most.lost;
  if (taken && (size_t)blocks > (size_t)most.of_multiprocessor / taken)
    blocks = (int)((size_t)most.of_multiprocessor / taken);
  return blocks;
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const Function* function, int threads, size_t dynamic) {
  return *blocks = occupancy(function, threads, dynamic), SUCCESS;
}

// ---- launches

typedef struct {
  unsigned id, padding, values[16];
} Attribute;
typedef struct {
  unsigned grid[3], block[3], dynamic;
  void* stream;
  const Attribute* attributes;
  unsigned count;
} Configuration;

Result cuLaunchKernelEx(const Configuration* launch, const Function* function, void** parameters, void** extra) {
  if (called()) return LAUNCH_FAILED;

  const unsigned *grid = launch->grid, *block = launch->block;
  const char* name = function->name;
  if (extra || !current) return refuse(INVALID_VALUE, "%s: no context, or parameters of another form", name);
  const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  if (threads == 0 || threads > 1024 || block[2] > 64)
    return refuse(INVALID_VALUE, "%s: blocks of %u x %u x %u", name, block[0], block[1], block[2]);
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535)
    return refuse(INVALID_VALUE, "%s: a grid of %u x %u x %u", name, grid[0], grid[1], grid[2]);
  const int blocks = occupancy(function, (int)threads, launch->dynamic);
  if (!blocks)
    return refuse(OUT_OF_RESOURCES, "%s: %lu threads (of at most %d) of %d registers, %d + %u bytes of shared memory",
                  name, threads, function->threads, function->registers, function->shared, launch->dynamic);
  for (unsigned i = 0; i < launch->count; i++) {
    const Attribute* attribute = &launch->attributes[i];
    const unsigned* cluster = attribute->values;
    const uint64_t all = (uint64_t)grid[0] * grid[1] * grid[2];
    switch (attribute->id) {
      case 2:  // cooperative
        if (cluster[0] && all > (uint64_t)blocks * (uint64_t)multiprocessors)
          return refuse(COOPERATIVE_LAUNCH_TOO_LARGE, "%s: %lu blocks that wait for each other, room for %d x %d", name,
                        all, blocks, multiprocessors);
        break;
      case 4:
        if (compute < 90 || cluster[0] * cluster[1] * cluster[2] > 8 || grid[0] % cluster[0] || grid[1] % cluster[1] ||
            grid[2] % cluster[2])
          return refuse(INVALID_VALUE, "%s: clusters of %u x %u x %u", name, cluster[0], cluster[1], cluster[2]);
        break;
      case 6:  // programmatic dependent launch
        if (compute < 90) return refuse(NOT_SUPPORTED, "%s: programmatic dependent launch", name);
        break;
      default: return refuse(NOT_SUPPORTED, "%s: attribute %u", name, attribute->id);
    }
  }
  for (int i = 0; i < function->parameters; i++)
    for (int at = 0; at + 8 <= function->sizes[i]; at += 8) {
      const Address value = number((const unsigned char*)parameters[i] + at, 8);
      if (value >= FIRST && value < next_address && !is_allocated(value, 0))
        return refuse(INVALID_VALUE, "%s: address %#lx at byte %d of parameter %d, which is free", name, value, at, i);
    }
  __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
  return SUCCESS;
}

// ---- tensor maps

// What both kinds have in common: extents and strides from the innermost on, steps between elements.
static const char* fault(int type, unsigned rank, Address address, const uint64_t* extents, const uint64_t* strides,
                         const unsigned* steps, unsigned inner, int interleaved, int swizzle) {
  static const unsigned SIZES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (compute < 90) return "before sm_90";
  if (type < 0 || type > 12 || interleaved || swizzle < 0 || swizzle > 3) return "a type, interleaving or swizzling";
  if (address % 16 || !is_allocated(address, 1)) return "an address";
  for (unsigned i = 0; i < rank; i++) {
    if (extents[i] == 0 || extents[i] > 1ull << 32) return "an extent";
    if (steps[i] < 1 || steps[i] > 8) return "a step";
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40)) return "a stride";
  }
  const unsigned bytes = inner * SIZES[type];
  if (bytes % 16 || (swizzle && bytes > 16u << swizzle)) return "the bytes of a row of a box";
  return NULL;
}

// A map keeps its address, as the device's maps do; the rest of its 128 bytes is of no use.
static Result left(uint64_t* map, Address address) { return memset(map, 0, 128), map[0] = address, SUCCESS; }

Result cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, Address address, const uint64_t* extents,
                              const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleaved,
                              int swizzle, int promotion, int fill) {
  if (called()) return LAUNCH_FAILED;

  (void)promotion, (void)fill;
  const char* why = rank < 1 || rank > 5
                        ? "a rank"
                        : fault(type, rank, address, extents, strides, steps, box[0], interleaved, swizzle);
  for (unsigned i = 0; !why && i < rank; i++)
    if (box[i] == 0 || box[i] > 256) why = "a box";
  return why ? refuse(INVALID_VALUE, "a tensor map: %s", why) : left(map, address);
}

Result cuTensorMapEncodeIm2col(uint64_t* map, int type, unsigned rank, Address address, const uint64_t* extents,
                               const uint64_t* strides, const int* lower, const int* upper, unsigned channels,
                               unsigned pixels, const unsigned* steps, int interleaved, int swizzle, int promotion,
                               int fill) {
  if (called()) return LAUNCH_FAILED;

  (void)promotion, (void)fill;
  const char* why = rank < 3 || rank > 5
                        ? "a rank"
                        : fault(type, rank, address, extents, strides, steps, channels, interleaved, swizzle);
  if (!why && (channels < 1 || channels > 256 || pixels < 1 || pixels > 1024)) why = "a box";
  const int most = rank == 3 ? 1 << 15 : rank == 4 ? 1 << 7 : 1 << 4;
  for (unsigned i = 0; !why && i + 2 < rank; i++)
    if (lower[i] < -most || lower[i] >= most || upper[i] < -most || upper[i] >= most) why = "a corner";
  return why ? refuse(INVALID_VALUE, "a tensor map of windows: %s", why) : left(map, address);
}
