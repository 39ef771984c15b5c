//! The C interface (liblodestone.so).
