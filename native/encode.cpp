// encode
