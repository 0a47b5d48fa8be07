/*
Stands where libcuda.so.1 is looked for, so that cuDNN makes plans for GPUs that are not here (cudnn_plans.cc): it
"loads" what was compiled, and there is no device. What cuDNN looks up but does not call to make a plan only has to be
there.
*/
static char loaded[4096];

int cuLibraryLoadData(void **library);
int cuLibraryGetKernel(void **kernel);
int cuLibraryUnload(void);
int cuDriverGetVersion(int *version);
int cuLibraryLoadData(void **library) { return *library = loaded, 0; }
int cuLibraryGetKernel(void **kernel) { return *kernel = loaded, 0; }
int cuLibraryUnload(void) { return 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }

#define NO_DEVICE(name)                                                                                                \
    int name(void);                                                                                                    \
    int name(void) { return 100; }
NO_DEVICE(cuInit)
NO_DEVICE(cuGetErrorName)
NO_DEVICE(cuGetErrorString)
NO_DEVICE(cuGetExportTable)
NO_DEVICE(cuGetProcAddress)
NO_DEVICE(cuGetProcAddress_v2)
NO_DEVICE(cuDeviceGetCount)
NO_DEVICE(cuDeviceGet)
NO_DEVICE(cuDeviceGetAttribute)
NO_DEVICE(cuCtxGetCurrent)
NO_DEVICE(cuCtxGetLimit)
NO_DEVICE(cuCtxSetLimit)
NO_DEVICE(cuCtxPopCurrent)
NO_DEVICE(cuCtxPopCurrent_v2)
NO_DEVICE(cuCtxPushCurrent)
NO_DEVICE(cuCtxPushCurrent_v2)
NO_DEVICE(cuStreamGetCtx)
NO_DEVICE(cuLinkCreate)
NO_DEVICE(cuLinkCreate_v2)
NO_DEVICE(cuLinkAddData)
NO_DEVICE(cuLinkAddData_v2)
NO_DEVICE(cuLinkComplete)
NO_DEVICE(cuLinkDestroy)
NO_DEVICE(cuModuleLoadData)
NO_DEVICE(cuModuleGetFunction)
NO_DEVICE(cuModuleUnload)
NO_DEVICE(cuFuncSetAttribute)
NO_DEVICE(cuFuncGetAttribute)
NO_DEVICE(cuLaunchKernel)
NO_DEVICE(cuLaunchKernelEx)
NO_DEVICE(cuLaunchCooperativeKernel)
NO_DEVICE(cuLibraryLoadFromFile)
NO_DEVICE(cuLibraryGetModule)
NO_DEVICE(cuKernelGetFunction)
NO_DEVICE(cuKernelSetAttribute)
NO_DEVICE(cuKernelGetAttribute)
NO_DEVICE(cuOccupancyMaxPotentialClusterSize)
NO_DEVICE(cuTensorMapEncodeIm2col)
NO_DEVICE(cuTensorMapEncodeTiled)
