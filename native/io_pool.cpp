// pread and pwrite on a pool of threads, and by the caller if they are quick; see hotrow/io_queue.h.
#include <hotrow/block_layout.h>
#include <hotrow/io_queue.h>
#include <hotrow/memory.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace hotrow {
namespace {

constexpr size_t kMostTaken = 2;  // slow I/Os that a thread takes at a time, so that it takes the lock once for several
// I/Os that need only the processor (holes, memory) take less than kQuickNs, those of a medium take more. While nearly
// all are quick, the engine's thread serves too, and other threads only if there are kWorthServing for each, because
// waking one costs more than several I/Os. A quick I/O adds a point, a slow one takes kSlowPoints: one slow I/O may be
// bad luck, two together are the medium.
constexpr int64_t kQuickNs = 20'000;
constexpr int kSlowPoints = 32, kMostPoints = 64;
constexpr size_t kWorthServing = 64;

int64_t perform(const Io& io) {
  const auto bytes = static_cast<size_t>(io.bytes);
  ssize_t moved;
  do {
#ifdef __APPLE__
    if (io.kind == Io::Kind::sync) moved = fsync(io.fd);
#else
    if (io.kind == Io::Kind::sync) moved = fdatasync(io.fd);
#endif
    else if (io.kind == Io::Kind::write)
      moved = pwrite(io.fd, io.data, bytes, io.offset);
    else
      moved = pread(io.fd, io.data, bytes, io.offset);
  } while (moved < 0 && errno == EINTR);
  return moved < 0 ? -errno : moved;
}

class Pool final : public IoQueue {
 public:
  explicit Pool(int depth) : frames_(allocate_pages(static_cast<size_t>(depth * kPageBytes))) {
    if (!frames_.data) throw std::bad_alloc();
  }
  ~Pool() override {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    more_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    free_pages(frames_);
  }

  // Starts fewer threads, and gives the reason, if the system refuses more. False if there is none.
  bool start(int num_threads, std::string& reason) {
    const auto wanted = static_cast<size_t>(num_threads);
    threads_.reserve(wanted);
    try {
      while (threads_.size() < wanted) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error& error) {
      const std::string count = std::to_string(threads_.size()) + " of " + std::to_string(wanted);
      reason = threads_refused("only " + count + " threads that read and write files", error.code().value());
    }
    return !threads_.empty();
  }

  std::byte* frames() override { return static_cast<std::byte*>(frames_.data); }
  int add_file(int) override { return -1; }
  void remove_file(int) override {}
  void submit(Io* io) override { submitted_.push_back(io); }

  void wait(int64_t at_least, std::vector<Io*>& ended) override {
    std::unique_lock lock(mutex_);
    queue_.insert(queue_.end(), submitted_.begin(), submitted_.end());
    wanted_ = static_cast<size_t>(std::max<int64_t>(at_least, 1));
    submitted_.clear();
    if (are_quick()) {
      const size_t servers = queue_.size() / kWorthServing, serving = threads_.size() - idle_ + 1;
      if (servers > serving) wake_idle(lock, servers - serving);
      while (are_quick() && !queue_.empty() && ended_.size() < wanted_) serve_share(lock, mine_);
    }
    if (!are_quick()) wake_idle(lock, queue_.size());
    some_.wait(lock, [&] { return woken_ || ended_.size() >= wanted_; });
    woken_ = false;
    ended.insert(ended.end(), ended_.begin(), ended_.end());
    ended_.clear();
  }

  void wake() override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    some_.notify_one();
  }

  int64_t cpu_ns() override {
    int64_t total = 0;
#ifndef __APPLE__
    for (std::thread& thread : threads_) {
      clockid_t clock;
      timespec time{};
      if (pthread_getcpuclockid(thread.native_handle(), &clock) == 0) clock_gettime(clock, &time);
      total += time.tv_sec * 1'000'000'000 + time.tv_nsec;
    }
#endif
    return total;
  }

 private:
  void perform_timed(Io& io) {
    const auto before = std::chrono::steady_clock::now();
    io.result = perform(io);
    const bool quick = std::chrono::steady_clock::now() - before < std::chrono::nanoseconds(kQuickNs);
    const int points = points_.load(std::memory_order_relaxed);
    points_.store(quick ? std::min(points + 1, kMostPoints) : std::max(points - kSlowPoints, 0),
                  std::memory_order_relaxed);
  }

  bool are_quick() const { return points_.load(std::memory_order_relaxed) >= kSlowPoints; }

  void wake_idle(std::unique_lock<std::mutex>& lock, size_t most) {
    const size_t news = std::min(most, idle_);
    if (news == 0) return;
    lock.unlock();  // else threads that wake would sleep again until it is free
    for (size_t i = 0; i < news; ++i) more_.notify_one();
    lock.lock();
  }

  void serve() {
    std::vector<Io*> mine;
    std::unique_lock lock(mutex_);
    while (true) {
      ++idle_;
      more_.wait(lock, [&] { return ending_ || !queue_.empty(); });
      --idle_;
      if (queue_.empty()) return;
      serve_share(lock, mine);
    }
  }

  // Performs a share of the queue, without the lock.
  void serve_share(std::unique_lock<std::mutex>& lock, std::vector<Io*>& mine) {
    const size_t share = queue_.size() / (threads_.size() + 1) + 1;
    for (size_t i = are_quick() ? share : std::min(share, kMostTaken); i > 0; --i) {
      mine.push_back(queue_.front());
      queue_.pop_front();
    }
    lock.unlock();
    for (Io* io : mine) perform_timed(*io);
    lock.lock();
    const bool enough_before = ended_.size() >= wanted_;
    ended_.insert(ended_.end(), mine.begin(), mine.end());
    mine.clear();
    if (!enough_before && ended_.size() >= wanted_) some_.notify_one();
  }

  Pages frames_;
  std::vector<Io*> submitted_, mine_;  // used by the engine's thread alone; the rest under the lock
  std::mutex mutex_;
  std::condition_variable more_, some_;
  std::deque<Io*> queue_;
  std::vector<Io*> ended_;
  size_t wanted_ = 1, idle_ = 0;
  bool woken_ = false, ending_ = false;
  std::atomic<int> points_{0};  // approximate: threads count concurrently
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> make_pool(int depth, int num_threads, std::string& reason) {
  auto pool = std::make_unique<Pool>(depth);
  if (!pool->start(num_threads, reason)) return nullptr;
  return pool;
}

std::string threads_refused(const std::string& what, int error) {
  return what + " could be started (" + std::strerror(error) +
         "): raise the limit of processes (ulimit -u), or the container's (pids.max)";
}

}  // namespace hotrow
