// The limit of benchmarks/block_store.py: one loop that keeps `depth` reads and writes of a file under way by io_uring,
// with registered memory and file, and does nothing else. Compiled on demand; shares no code with hotrow.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

// Moves `bytes` at offsets[i] for all i < n; i is written where writes[i] is set. Waits for `batch` I/Os at a time.
// Ends with fdatasync where sync is set. cpu_s: processor seconds of this thread. Returns 0, or the line that failed.
extern "C" int raw(const char* path, const int64_t* offsets, const uint8_t* writes, int64_t n, int64_t bytes, int depth,
                   int batch, int sync, double* cpu_s) {
  const int fd = open(path, O_RDWR | O_DIRECT);
  if (fd < 0) return __LINE__;
  io_uring_params p{};
  p.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  const int ring = static_cast<int>(syscall(SYS_io_uring_setup, depth, &p));
  if (ring < 0) return __LINE__;
  const size_t rings_bytes = p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe) + p.sq_entries * sizeof(unsigned) + 4096;
  auto* rings = static_cast<char*>(mmap(nullptr, rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING));
  const size_t sqes_bytes = p.sq_entries * sizeof(io_uring_sqe);
  auto* sqes = static_cast<io_uring_sqe*>(mmap(nullptr, sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES));
  if (rings == MAP_FAILED || sqes == MAP_FAILED) return __LINE__;
  auto word = [&](unsigned at) { return reinterpret_cast<unsigned*>(rings + at); };
  unsigned *tail = word(p.sq_off.tail), *head = word(p.cq_off.head), *end = word(p.cq_off.tail);
  const unsigned mask = *word(p.sq_off.ring_mask), done_mask = *word(p.cq_off.ring_mask);
  for (unsigned i = 0; i < p.sq_entries; ++i) word(p.sq_off.array)[i] = i;
  auto* events = reinterpret_cast<io_uring_cqe*>(rings + p.cq_off.cqes);
  const size_t frame = static_cast<size_t>((bytes + 4095) / 4096 * 4096), memory_bytes = frame * static_cast<size_t>(depth);
  auto* memory = static_cast<char*>(std::aligned_alloc(4096, memory_bytes));
  std::memset(memory, 1, memory_bytes);
  const iovec buffer{memory, memory_bytes};
  if (syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1) < 0) return __LINE__;
  if (syscall(SYS_io_uring_register, ring, IORING_REGISTER_FILES, &fd, 1) < 0) return __LINE__;

  const double start = seconds(CLOCK_THREAD_CPUTIME_ID);
  int64_t sent = 0, done = 0;
  unsigned to_submit = 0, at = *tail;
  auto send = [&](uint64_t slot) {
    io_uring_sqe& e = sqes[at & mask];
    std::memset(&e, 0, sizeof e);
    e.opcode = writes[sent] ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
    e.flags = IOSQE_FIXED_FILE;
    e.addr = reinterpret_cast<uint64_t>(memory + slot * frame);
    e.len = static_cast<unsigned>(bytes);
    e.off = static_cast<uint64_t>(offsets[sent++]);
    e.user_data = slot;
    ++at, ++to_submit;
  };
  for (int i = 0; i < depth && sent < n; ++i) send(static_cast<uint64_t>(i));
  while (done < n) {
    __atomic_store_n(tail, at, __ATOMIC_RELEASE);
    const int64_t under_way = sent - done;
    const auto wait = static_cast<unsigned>(under_way < batch ? under_way : batch);
    const long went = syscall(SYS_io_uring_enter, ring, to_submit, wait, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (went < 0) return __LINE__;
    to_submit -= static_cast<unsigned>(went);
    const unsigned last = __atomic_load_n(end, __ATOMIC_ACQUIRE);
    unsigned from = *head;
    for (; from != last; ++from) {
      const io_uring_cqe& event = events[from & done_mask];
      if (event.res != bytes) return __LINE__;
      ++done;
      if (sent < n) send(event.user_data);
    }
    __atomic_store_n(head, from, __ATOMIC_RELEASE);
  }
  if (sync && fdatasync(fd) != 0) return __LINE__;
  *cpu_s = seconds(CLOCK_THREAD_CPUTIME_ID) - start;
  close(ring);
  close(fd);
  munmap(rings, rings_bytes);
  munmap(sqes, sqes_bytes);
  std::free(memory);
  return 0;
}
