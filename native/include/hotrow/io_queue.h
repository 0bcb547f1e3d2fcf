// Reads and writes of files that are under way together: io_uring, or a pool of threads. One thread, the engine's,
// calls everything but wake and cpu_ns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hotrow {

struct Io {
  enum class Kind : uint8_t { read, write, sync };
  Kind kind;
  int fd;
  int file;         // what add_file said
  std::byte* data;  // aligned for the file
  bool in_frames;   // data lies in the queue's frames
  int64_t offset;
  int64_t bytes;
  int64_t result;  // bytes moved, or -errno
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;
  // Memory for I/Os, prepared for them: `depth` frames of kPageBytes.
  virtual std::byte* frames() = 0;
  virtual int add_file(int fd) = 0;
  virtual void remove_file(int file) = 0;
  // Takes `io`, which stays where it is until it has ended; on its way at the next wait. At most `depth` at a time.
  virtual void submit(Io* io) = 0;
  // Sends what was submitted and sleeps until about `at_least` have ended, or somebody woke it, or did before. A pool
  // may do some itself, or keep some until the next wait.
  virtual void wait(int64_t at_least, std::vector<Io*>& ended) = 0;
  virtual void wake() = 0;
  // Processor time of threads beside the caller's.
  virtual int64_t cpu_ns() = 0;
};

// Null, and the reason, where the system refuses it. Must be called by the thread that will use it.
std::unique_ptr<IoQueue> make_ring(int depth, std::string& reason);
// Null, and the reason, where not one thread can be started; a pool, and the reason, where fewer can than num_threads.
std::unique_ptr<IoQueue> make_pool(int depth, int num_threads, std::string& reason);

// Of threads that the system refuses; what: which. error: its errno.
std::string threads_refused(const std::string& what, int error);

}  // namespace hotrow
