// A queue of concurrent reads and writes of files: io_uring, or a pool of threads. One thread, the engine's, calls
// everything except wake and cpu_ns.
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
  int file;         // the result of add_file
  std::byte* data;  // aligned for the file
  bool in_frames;   // data is in the queue's frames
  int64_t offset;
  int64_t bytes;
  int64_t result;  // bytes moved, or -errno
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;
  // Memory prepared for I/Os: `depth` frames of kPageBytes.
  virtual std::byte* frames() = 0;
  virtual int add_file(int fd) = 0;
  virtual void remove_file(int file) = 0;
  // Takes `io`, which must stay in place until it has ended; it is sent at the next wait. At most `depth` at a time.
  virtual void submit(Io* io) = 0;
  // Sends what was submitted and sleeps until about `at_least` I/Os have ended, or until `wake` is called or was called
  // before. A pool may do some I/Os itself, or keep some until the next wait.
  virtual void wait(int64_t at_least, std::vector<Io*>& ended) = 0;
  virtual void wake() = 0;
  // Processor time of threads other than the caller's.
  virtual int64_t cpu_ns() = 0;
};

// Null, and the reason, if the system refuses it. Must be called by the thread that will use it.
std::unique_ptr<IoQueue> make_ring(int depth, std::string& reason);
// Null, and the reason, if no thread can be started; a pool, and the reason, if fewer than num_threads can.
std::unique_ptr<IoQueue> make_pool(int depth, int num_threads, std::string& reason);

// The message about threads that the system refuses; what: which threads. error: the errno.
std::string threads_refused(const std::string& what, int error);

}  // namespace hotrow
