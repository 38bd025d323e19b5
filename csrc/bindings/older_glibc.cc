// The extension links libstdc++ statically, so that it runs on systems with an older one. That library's random_device
// refers to a function of glibc 2.36, and the linker keeps the reference though nothing here uses random_device. This
// definition, which stays inside the extension, lets it load where glibc has none.

#include <cstdint>
#include <cstdlib>

extern "C" __attribute__((visibility("hidden"))) std::uint32_t arc4random() { std::abort(); }
