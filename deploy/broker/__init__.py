"""One launcher, two brokers behind it: the embedded one, and Apache Kafka from KAFKA_HOME."""
