// What programs that `example` prints use of ncnn's interface, as net.h, mat.h and option.h of 2026-07-22 declare it.
#ifndef NET_H
#define NET_H

#include <cstddef>

namespace ncnn {

class Allocator;

class Mat
{
public:
    enum PixelType
    {
        PIXEL_RGB = 1,
        PIXEL_BGR = 2,
        PIXEL_GRAY = 3
    };

    Mat();
    Mat(int w, size_t elemsize = 4u, Allocator* allocator = 0);
    Mat(int w, int h, size_t elemsize = 4u, Allocator* allocator = 0);
    Mat(int w, int h, int c, size_t elemsize = 4u, Allocator* allocator = 0);
    Mat(int w, int h, int d, int c, size_t elemsize = 4u, Allocator* allocator = 0);
    Mat(int w, size_t elemsize, int elempack, Allocator* allocator = 0);
    Mat(int w, int h, size_t elemsize, int elempack, Allocator* allocator = 0);
    Mat(int w, int h, int c, size_t elemsize, int elempack, Allocator* allocator = 0);
    Mat(int w, int h, int d, int c, size_t elemsize, int elempack, Allocator* allocator = 0);
    Mat(int w, size_t elemsize, int elempack, int n, Allocator* allocator = 0);
    Mat(int w, int h, size_t elemsize, int elempack, int n, Allocator* allocator = 0);
    Mat(int w, int h, int c, size_t elemsize, int elempack, int n, Allocator* allocator = 0);
    Mat(int w, int h, int d, int c, size_t elemsize, int elempack, int n, Allocator* allocator = 0);
    Mat(int w, void* data, size_t elemsize = 4u, Allocator* allocator = 0);
    Mat(const Mat& m);
    ~Mat();

    Mat channel(int c);
    const Mat channel(int c) const;
    Mat batch(int b);
    const Mat batch(int b) const;
    float* row(int y);
    const float* row(int y) const;
    void fill(float v);
    void fill(int v);
    template<typename T>
    operator T*();
    template<typename T>
    operator const T*() const;

    static Mat from_pixels_resize(const unsigned char* pixels, int type, int w, int h, int target_width,
                                  int target_height, Allocator* allocator = 0);
    void substract_mean_normalize(const float* mean_vals, const float* norm_vals);

    int dims, w, h, d, c, n;
};

enum BorderType
{
    BORDER_CONSTANT = 0
};

struct Option
{
    bool use_fp16_packed, use_fp16_storage, use_fp16_arithmetic, use_bf16_packed, use_bf16_storage;
};

void copy_make_border(const Mat& src, Mat& dst, int top, int bottom, int left, int right, int type, float v,
                      const Option& opt = Option());

class Extractor
{
public:
    Extractor(const Extractor&);
    ~Extractor();
    int input(const char* blob_name, const Mat& in);
    int input(int blob_index, const Mat& in);
    int extract(const char* blob_name, Mat& feat, int type = 0);
    int extract(int blob_index, Mat& feat, int type = 0);
};

class Layer;
typedef Layer* (*layer_creator_func)(void*);
typedef void (*layer_destroyer_func)(Layer*, void*);

class Net
{
public:
    Net();
    ~Net();
    Option opt;
    int register_custom_layer(int index, layer_creator_func creator, layer_destroyer_func destroyer = 0,
                              void* userdata = 0);
    int load_param(const char* protopath);
    int load_param(const unsigned char* mem);
    int load_model(const char* modelpath);
    int load_model(const unsigned char* mem);
    Extractor create_extractor() const;
};

unsigned short float32_to_float16(float value);
float float16_to_float32(unsigned short value);

} // namespace ncnn

#endif // NET_H
