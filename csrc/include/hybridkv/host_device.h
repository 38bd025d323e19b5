// Marks what both the host and a device run, so that one source is compiled by g++ and by nvcc.
#ifndef HYBRIDKV_HOST_DEVICE_H_
#define HYBRIDKV_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define HYBRIDKV_HOST_DEVICE __host__ __device__
#else
#define HYBRIDKV_HOST_DEVICE
#endif

#endif  // HYBRIDKV_HOST_DEVICE_H_
