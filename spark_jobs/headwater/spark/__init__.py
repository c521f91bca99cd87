"""The JVM: Java, jars, sessions."""
