// io_uring through its system calls; see hotrow/io_queue.h.
#include <hotrow/io_queue.h>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <hotrow/block_layout.h>
#include <hotrow/memory.h>
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// Newer than the headers of some systems. The kernel refuses flags that it does not know.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace hotrow {
namespace {

constexpr unsigned kMostFiles = 1024;  // beyond, files are used without being registered

int ring_setup(unsigned entries, io_uring_params* params) {
  return static_cast<int>(syscall(SYS_io_uring_setup, entries, params));
}
int ring_enter(int ring, unsigned to_submit, unsigned at_least) {
  return static_cast<int>(syscall(SYS_io_uring_enter, ring, to_submit, at_least, IORING_ENTER_GETEVENTS, nullptr, 0));
}
int ring_register(int ring, unsigned what, const void* values, unsigned count) {
  return static_cast<int>(syscall(SYS_io_uring_register, ring, what, values, count));
}

template <class T>
T* at(void* base, unsigned offset) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(base) + offset);
}

std::string refused(const char* what, const char* cure) {
  return std::string(what) + " is refused here (" + std::strerror(errno) + "): " + cure;
}

const char* cure_of_setup(int error) {
  if (error == ENOSYS) return "the kernel is older than 5.1 or built without it";
  if (error == ENOMEM) return "raise the limit of locked memory (ulimit -l) to 4 MiB";
  return "allow it in the container's seccomp profile and set kernel.io_uring_disabled to 0";
}

class Ring final : public IoQueue {
 public:
  ~Ring() override {
    if (entries_) munmap(entries_, entries_bytes_);
    if (rings_) munmap(rings_, rings_bytes_);
    if (ring_ >= 0) close(ring_);
    if (wake_ >= 0) close(wake_);
    free_pages(frames_);
  }

  // False, with the reason, if it fails.
  bool open(int depth, std::string& reason) {
    if (!open_ring(static_cast<unsigned>(depth), reason)) return false;
    frames_ = allocate_pages(static_cast<size_t>(depth * kPageBytes));
    const iovec frames{frames_.data, frames_.bytes};
    if (!frames_.data || ring_register(ring_, IORING_REGISTER_BUFFERS, &frames, 1) < 0) {
      reason = refused("registering buffers with io_uring", "raise the limit of locked memory (ulimit -l) to 4 MiB");
      return false;
    }
    const std::vector<int> none(kMostFiles, -1);
    if (ring_register(ring_, IORING_REGISTER_FILES, none.data(), kMostFiles) == 0) free_files_.resize(kMostFiles);
    for (size_t i = 0; i < free_files_.size(); ++i) free_files_[i] = static_cast<int>(free_files_.size() - 1 - i);
    wake_ = eventfd(0, EFD_CLOEXEC);
    if (wake_ < 0) {
      reason = refused("an eventfd", "raise the limit of open files (ulimit -n)");
      return false;
    }
    listen();
    return try_once(reason);
  }

  std::byte* frames() override { return static_cast<std::byte*>(frames_.data); }

  int add_file(int fd) override {
    if (free_files_.empty()) return -1;
    const int file = free_files_.back();
    if (!set_file(file, fd)) return -1;
    free_files_.pop_back();
    return file;
  }
  void remove_file(int file) override {
    if (file >= 0 && set_file(file, -1)) free_files_.push_back(file);
  }

  void submit(Io* io) override {
    io_uring_sqe& entry = next_entry();
    entry.user_data = reinterpret_cast<uint64_t>(io);
    entry.fd = io->file >= 0 ? io->file : io->fd;
    entry.flags = io->file >= 0 ? IOSQE_FIXED_FILE : 0;
    if (io->kind == Io::Kind::sync) {
      entry.opcode = IORING_OP_FSYNC;
      entry.fsync_flags = IORING_FSYNC_DATASYNC;
      return;
    }
    const bool write = io->kind == Io::Kind::write;
    entry.opcode = io->in_frames ? (write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED)
                                 : (write ? IORING_OP_WRITE : IORING_OP_READ);
    entry.addr = reinterpret_cast<uint64_t>(io->data);
    entry.len = static_cast<uint32_t>(io->bytes);
    entry.off = static_cast<uint64_t>(io->offset);
  }

  void wait(int64_t at_least, std::vector<Io*>& ended) override {
    enter_ring(static_cast<unsigned>(at_least > 1 ? at_least : 1));
    const unsigned tail = std::atomic_ref(*done_tail_).load(std::memory_order_acquire);
    bool woken = false;
    for (; done_head_value_ != tail; ++done_head_value_) {
      const io_uring_cqe& event = events_[done_head_value_ & done_mask_];
      if (event.user_data == 0) {
        woken = true;
        continue;
      }
      Io* io = reinterpret_cast<Io*>(event.user_data);
      io->result = event.res;
      ended.push_back(io);
    }
    std::atomic_ref(*done_head_).store(done_head_value_, std::memory_order_release);
    if (woken) listen();
  }

  void wake() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
  }

  int64_t cpu_ns() override { return 0; }

 private:
  bool open_ring(unsigned depth, std::string& reason) {
    // The thread that waits for completions should also gather them (Linux 6.1); older systems refuse the flags.
    io_uring_params params{};
    for (const unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0u}) {
      params = {};
      params.flags = flags;
      ring_ = ring_setup(depth + 2, &params);  // one more entry is the wake-up
      if (ring_ >= 0 || errno != EINVAL) break;
    }
    if (ring_ < 0) {
      reason = refused("io_uring", cure_of_setup(errno));
      return false;
    }
    return map(params, reason);
  }

  bool map(const io_uring_params& params, std::string& reason) {
    const size_t queue = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t events = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = queue > events ? queue : events;
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    const auto share = [&](size_t bytes, uint64_t what) {
      void* map =
          mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, static_cast<off_t>(what));
      return map == MAP_FAILED ? nullptr : map;
    };
    if (params.features & IORING_FEAT_SINGLE_MMAP) rings_ = share(rings_bytes_, IORING_OFF_SQ_RING);
    if (rings_) entries_ = static_cast<io_uring_sqe*>(share(entries_bytes_, IORING_OFF_SQES));
    if (!entries_) {
      reason = refused("mapping io_uring", "Linux 5.4 or newer is needed, and memory to lock (ulimit -l)");
      return false;
    }
    queue_tail_ = at<unsigned>(rings_, params.sq_off.tail);
    queue_mask_ = *at<unsigned>(rings_, params.sq_off.ring_mask);
    done_head_ = at<unsigned>(rings_, params.cq_off.head);
    done_tail_ = at<unsigned>(rings_, params.cq_off.tail);
    done_mask_ = *at<unsigned>(rings_, params.cq_off.ring_mask);
    events_ = at<io_uring_cqe>(rings_, params.cq_off.cqes);
    unsigned* order = at<unsigned>(rings_, params.sq_off.array);
    for (unsigned i = 0; i < params.sq_entries; ++i) order[i] = i;
    return true;
  }

  // Makes one real read through the ring, of its wake-up: a filter may allow io_uring_setup and refuse io_uring_enter.
  bool try_once(std::string& reason) {
    wake();
    if (ring_enter(ring_, to_submit_, 1) < 0) {
      reason = refused("entering io_uring", "allow io_uring_enter in the container's seccomp profile");
      return false;
    }
    to_submit_ = 0;
    const io_uring_cqe& event = events_[done_head_value_ & done_mask_];
    if (event.res < 0) {
      errno = -event.res;
      reason = refused("reading through io_uring", "Linux 5.6 or newer is needed");
      return false;
    }
    std::atomic_ref(*done_head_).store(++done_head_value_, std::memory_order_release);
    listen();
    return true;
  }

  io_uring_sqe& next_entry() {
    io_uring_sqe& entry = entries_[queue_tail_value_ & queue_mask_];
    std::memset(&entry, 0, sizeof entry);
    std::atomic_ref(*queue_tail_).store(++queue_tail_value_, std::memory_order_release);
    ++to_submit_;
    return entry;
  }

  void listen() {
    io_uring_sqe& entry = next_entry();
    entry.opcode = IORING_OP_READ;
    entry.fd = wake_;
    entry.addr = reinterpret_cast<uint64_t>(&woken_);
    entry.len = sizeof woken_;
  }

  void enter_ring(unsigned at_least) {
    while (true) {
      const int sent = ring_enter(ring_, to_submit_, at_least);
      if (sent >= 0) {
        to_submit_ -= static_cast<unsigned>(sent);
        if (to_submit_ == 0) return;
      } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        // The kernel may still write into the frames, and nobody could say which rows are whole.
        std::fprintf(stderr, "hotrow: io_uring_enter failed: %s\n", std::strerror(errno));
        std::abort();
      } else if (errno == EBUSY || std::atomic_ref(*done_tail_).load(std::memory_order_acquire) != done_head_value_) {
        return;  // ended I/Os must be taken before more are sent
      } else if (errno == EAGAIN) {
        usleep(1000);  // the system is short of resources
      }
    }
  }

  bool set_file(int file, int fd) {
    const io_uring_files_update update{static_cast<uint32_t>(file), 0, reinterpret_cast<uint64_t>(&fd)};
    return ring_register(ring_, IORING_REGISTER_FILES_UPDATE, &update, 1) == 1;
  }

  int ring_ = -1, wake_ = -1;
  Pages frames_{nullptr, 0, false};
  std::vector<int> free_files_;
  void* rings_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  size_t rings_bytes_ = 0, entries_bytes_ = 0;
  unsigned *queue_tail_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
  unsigned queue_mask_ = 0, done_mask_ = 0, queue_tail_value_ = 0, done_head_value_ = 0, to_submit_ = 0;
  io_uring_cqe* events_ = nullptr;
  uint64_t woken_ = 0;
};

}  // namespace

std::unique_ptr<IoQueue> make_ring(int depth, std::string& reason) {
  auto ring = std::make_unique<Ring>();
  if (!ring->open(depth, reason)) return nullptr;
  return ring;
}

}  // namespace hotrow

#else

namespace hotrow {

std::unique_ptr<IoQueue> make_ring(int, std::string& reason) {
  reason = "io_uring is a part of Linux, and its header was not there when hotrow was built";
  return nullptr;
}

}  // namespace hotrow
#endif
